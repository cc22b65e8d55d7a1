"""The same objects as a Helm chart: a frozen plan with the few values that may change without it."""

from trainshed.launch.kubernetes.helm.chart import write_chart

__all__ = ["write_chart"]
