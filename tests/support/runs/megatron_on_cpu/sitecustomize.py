"""Loaded by every Python that finds it on its path: lets Megatron-LM run without a GPU, Transformer Engine or triton.

The patches of torch.cuda are `cpu_shim` and `megatron_late` of ../shared/peers/megatron_on_cpu, which lies on the path
too. Here is what these lack: a module called triton, which some versions import and never call on a CPU; norms for
sequence parallel, whose parameters Transformer Engine and Apex mark so that their gradients are summed over tp ranks;
a distributed optimizer that works without Transformer Engine; an Adam that keeps its state as Apex's does, since some
versions cannot load their distributed optimizer's checkpoints into PyTorch's; and what a resumed run needs to equal one
that never stopped: random states that are restored at once, and checkpoints that are copied before they are written.
"""

import collections
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types


class _StandIn:
    """Anything: it is called, decorates and has attributes, and does nothing."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, *arguments, **keywords):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not keywords else _StandIn()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()


class _StandInModule(types.ModuleType):
    __path__ = ()
    __getattr__ = _StandIn.__getattr__


def _add_sequence_parallel(module):
    build = module.WrappedTorchNorm.__new__

    def with_sequence_parallel(cls, config, *arguments, **keywords):
        is_parallel, config.sequence_parallel = config.sequence_parallel, False
        norm = build(cls, config, *arguments, **keywords)
        config.sequence_parallel = is_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = is_parallel
        return norm

    module.WrappedTorchNorm.__new__ = with_sequence_parallel


def _quantize_nothing(module):
    # Some versions call it without a parameter in fp8, too, and it asks for Transformer Engine.
    module._quantize_param_shard_impl = lambda *_, **__: None


def _load_no_fp8(module):
    # 0.12 asks which Transformer Engine is there before it looks for parameters in fp8.
    if hasattr(module, "fix_fp8_params_lose_precision_when_loading_dist_ckpt"):
        module.fix_fp8_params_lose_precision_when_loading_dist_ckpt = lambda *_: None


@functools.cache
def _adam():
    torch = importlib.import_module("torch")

    class Adam(torch.optim.Optimizer):
        """AdamW that counts its steps in the parameter group."""

        def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
            if not adam_w_mode:
                raise NotImplementedError("this stand-in decays weights as AdamW does")
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                first, second = group["betas"]
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    for key in ("exp_avg", "exp_avg_sq"):
                        if key not in state:
                            state[key] = torch.zeros_like(parameter)
                    state["exp_avg"].lerp_(parameter.grad, 1 - first)
                    state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                    mean = state["exp_avg"] / (1 - first ** group["step"])
                    root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt()
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(group["lr"] * mean / (root + group["eps"]))

    return Adam


def _take_adam(module):
    # Versions from 0.16 on take PyTorch's whatever `Adam` is, unless they are told that it is not PyTorch's.
    module.Adam, module.USING_PYTORCH_OPTIMIZER = _adam(), False
    # Versions before 0.14 load the groups of the first pipeline stage on all of them, by number. Those of Transformer
    # Engine's layers come in one order on every stage; those of a CPU's do not, and would get each other's decay.
    group = module._get_param_groups
    module._get_param_groups = lambda *arguments, **keywords: sorted(
        group(*arguments, **keywords), key=lambda made: -made["wd_mult"]
    )


def _take_adam_of_apex(module):
    module.Adam, module.HAVE_APEX_OR_TE, module.USING_APEX_OPTIMIZER = _adam(), True, True


def _restore_states(module):
    # Megatron-LM leaves this to torch.cuda, which keeps the call for the moment when a GPU is first used. The seeds of
    # tensor parallel ranks would stay in force, and weights that all of them hold would begin different on each.
    torch = importlib.import_module("torch")
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _copy_before_writing(module):
    # What brings tensors from a GPU is a copy. A tensor that is on the CPU already would be shared with the process
    # that writes it, while the next steps change it.
    writer = module.FileSystemWriterAsync
    bring = writer.preload_tensors

    @functools.wraps(bring)  # the process that writes finds it by this name
    def preload_tensors(*arguments, **keywords):
        return [
            (file, key, (texts, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (texts, tensors) in bring(*arguments, **keywords)
        ]

    writer.preload_tensors = staticmethod(preload_tensors)


_CHANGES = {
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _copy_before_writing,
    "megatron.core.optimizer": _take_adam,
    "megatron.core.optimizer.distrib_optimizer": _take_adam_of_apex,
    "megatron.core.tensor_parallel.random": _restore_states,
    "megatron.core.transformer.torch_norm": _add_sequence_parallel,
    "megatron.core.fp8_utils": _quantize_nothing,
    "megatron.training.checkpointing": _load_no_fp8,
}


class _ChangingFinder(importlib.abc.MetaPathFinder):
    """Changes modules of Megatron's when they are imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in _CHANGES:
            return None
        change = _CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SHIM") == "1":
    torch = importlib.import_module("torch")
    importlib.import_module("torch._dynamo")  # before triton seems to be there
    for name in ("triton", "triton.language"):
        stand_in = _StandInModule(name)
        stand_in.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        stand_in.__version__ = "0"
        sys.modules[name] = stand_in
    setattr(sys.modules["triton"], "language", sys.modules["triton.language"])  # noqa: B010
    sys.meta_path.insert(0, _ChangingFinder())
    importlib.import_module("cpu_shim")
    importlib.import_module("megatron_late")
    # Versions before 0.16 are for numpy 1.
    numpy = importlib.import_module("numpy")
    numpy.product = numpy.prod
    # What --log-memory-to-tensorboard reads.
    torch.cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
