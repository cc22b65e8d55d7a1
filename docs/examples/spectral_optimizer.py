"""Momentum divided by the largest singular value, as `train.optimizer.name: spectral`."""

from trainshed.engines.torch.optimizer_registry import OPTIMIZERS, MatrixOptimizer


@OPTIMIZERS.register("spectral")
class SpectralDescent(MatrixOptimizer):
    """Steps of spectral norm lr; `options: {momentum: 0.9}`."""

    state_names = ("momentum",)

    def __init__(self, settings, momentum: float = 0.9):
        super().__init__(settings)
        self.momentum = momentum

    def prepare(self, gradient, state, updates):
        """Average the gradient of a shard."""
        return state["momentum"].mul_(self.momentum).add_(gradient)

    def direction(self, matrices):
        """Divide whole matrices [count, rows, columns] by their spectral norms."""
        import torch

        return matrices / torch.linalg.matrix_norm(matrices, ord=2, keepdim=True).clamp(min=1e-12)
