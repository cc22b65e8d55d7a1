"""Cross entropy with label smoothing and a z-loss, as `train.loss: smooth`."""

from trainshed.models.token_loss import LOSSES, TokenLoss


@LOSSES.register("smooth")
class SmoothLoss(TokenLoss):
    """A share of each label goes to all words alike; `options: {smoothing: 0.1, z: 1.0e-4}`."""

    def __init__(self, smoothing: float = 0.1, z: float = 0.0):
        self.smoothing, self.z = smoothing, z

    def loss(self, logits, labels):
        """Return the loss of each token."""
        mean = logits.sum(logits.values) / logits.vocab_size
        return logits.log_normalizer() - (1 - self.smoothing) * logits.of_labels(labels) - self.smoothing * mean

    def extra(self, logits, labels):
        """Return the z-loss of each token: it keeps the normalizer near 1."""
        return self.z * logits.log_normalizer() ** 2
