"""SGD with momentum, as `train.optimizer.name: sgd`."""

from trainshed.engines.torch.optimizer_registry import OPTIMIZERS, ElementwiseOptimizer


@OPTIMIZERS.register("sgd")
class Sgd(ElementwiseOptimizer):
    """Stochastic gradient descent; `options: {momentum: 0.9}`."""

    state_names = ("momentum",)

    def __init__(self, settings, momentum: float = 0.9):
        super().__init__(settings)
        self.momentum = momentum

    def update(self, weight, gradient, state, lr, updates):
        """Change one tensor and its state in place."""
        state["momentum"].mul_(self.momentum).add_(gradient)
        weight.sub_(lr * state["momentum"])
