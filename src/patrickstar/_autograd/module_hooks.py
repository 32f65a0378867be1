"""Hooks of an engine on the user's modules: full-precision state dicts, and windows around module calls.

Modules whose operators can't be intercepted get one window around the whole call. These are modules under
`torch.compile`, which traces through operators, those of TorchScript, whose operators Python does not call, and
PyTorch's attention layers in inference, which take a code path with different bits if an argument has
`__torch_function__`. So do experts that are shared out over processes: which of their operators run depends on the
tokens, and linked processes make the same accesses ([Note: linked processes]).
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from patrickstar._autograd.interceptor import Interceptor
from patrickstar._autograd.module_windows import (
    ModuleUse,
    abandon_module_window,
    close_module_window,
    open_module_window,
)
from patrickstar._hardware.sigint_gate import deferring_sigint, interruptible
from patrickstar._kernels.torch_optim_adapter import import_compiler
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar.errors import ModelError, TrainingError

MATRIX_DIMS = 2
FAST_PATH_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def _managed_params_of(module: nn.Module) -> tuple[ManagedParam, ...]:
    # An enclosing module's window makes these plain Parameters, so the class can't be checked.
    return tuple(param._managed_params[0] for param in module.parameters() if hasattr(param, "_managed_params"))


def _is_of_experts(param: Any) -> bool:
    """Return whether a parameter is sharded by expert: of one batch in each process, or with an expert dimension."""
    managed = managed_param_of(param)
    if managed is None or managed.sharding is None or not managed.is_dtensor:
        return False
    return managed.sharding.mixes_batches or len(managed.full_shape) > MATRIX_DIMS


def _has_experts(module: nn.Module) -> bool:
    return any(_is_of_experts(param) for param in module._parameters.values())


def check_no_graphs(model: nn.Module) -> None:
    """Raise ModelError if a module is compiled to CUDA graphs, which would read parameters where chunks were before."""
    for name, module in model.named_modules():
        compiled = module if isinstance(module, torch._dynamo.OptimizedModule) else module._compiled_call_impl
        config = compiled.get_compiler_config() if hasattr(compiled, "get_compiler_config") else None
        if config is not None and config.get("triton.cudagraphs", False):
            subject = f"module {name!r}" if name else "the model"
            raise ModelError(
                f"{subject} is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'), which read "
                f"parameters at fixed addresses, and the engine moves them: compile it without a mode, or with "
                f"mode='max-autotune-no-cudagraphs'"
            )


@cache
def leave_to_python() -> None:
    """Let functions under `torch.compile` that take a parameter stop at its operators, which then run in Python.

    Otherwise the compiler traces this package, and replays its accesses and transfers as they were in the first call.
    """
    import_compiler()
    torch._dynamo.trace_rules.add(__name__.partition(".")[0])


def _input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a language model's input. Masks and caches grow with each token, and change no access."""
    named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds", "decoder_input_ids"))
    shapes = (tuple(value.shape) for value in (*args, *named) if isinstance(value, torch.Tensor))
    return next(shapes, ())


class EngineHook:
    """Hook that an engine registers on a module. Copies of the module have it without effect."""

    def __init__(self, call: Callable[..., Any] = lambda *args: None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> "EngineHook":
        return EngineHook()

    def __reduce__(self) -> Any:
        # A function of the standard library that accepts any arguments and does nothing, so that a pickled module loads
        # without this package.
        return getattr, (nullcontext(), "__exit__")


class WrappedMethod:
    """Function in place of a module's method; copies of the module call their own method instead."""

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name, self._call = module, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._module)]
        return getattr(type(copied), self._name).__get__(copied)

    def __reduce__(self) -> Any:
        return getattr, (self._module, self._name)  # of the loaded module, which has no other method yet


class ModuleHooks:
    """Registers hooks on modules while an engine manages the model.

    Args:
        interceptor: Opens and closes windows.
        before_state_dict, after_state_dict: State-dict hooks for modules with parameters of their own.
    """

    def __init__(
        self, interceptor: Interceptor, before_state_dict: Callable[..., None], after_state_dict: Callable[..., None]
    ) -> None:
        self.interceptor = interceptor
        self.before_state_dict, self.after_state_dict = before_state_dict, after_state_dict
        leave_to_python()
        self._undo = interceptor.closer.undo
        self._hooked: set[nn.Module] = set()
        self._saved: set[nn.Module] = set()
        self._generating: set[nn.Module] = set()

    def notice(self, module: nn.Module) -> None:
        """Hook modules that are not hooked yet; users may add and compile modules at any time.

        Raises:
            ModelError: A module is compiled to CUDA graphs.
        """
        if self.interceptor.data.manager.hardware.accelerator is not None:
            check_no_graphs(module)
        for submodule in module.modules():
            if submodule._parameters and submodule not in self._saved:
                before, after = EngineHook(self.before_state_dict), EngineHook(self.after_state_dict)
                # Of the base class, since script modules refuse to register hooks that they then run.
                self._undo.append(nn.Module.register_state_dict_pre_hook(submodule, before).remove)
                self._undo.append(nn.Module._register_state_dict_hook(submodule, after).remove)
                self._saved.add(submodule)
                self._keep_layout(submodule)
                if self.interceptor.data.shards.world.size > 1 and not isinstance(submodule, torch.jit.ScriptModule):
                    self._wrap_apply(submodule)
            if callable(getattr(submodule, "generate", None)) and submodule not in self._generating:
                self._hook_generation(submodule)
                self._generating.add(submodule)
            if hasattr(type(submodule), "update_and_allocate") and "update_and_allocate" not in vars(submodule):
                self._explain_allocation(submodule)
            if submodule in self._hooked:
                continue
            if isinstance(submodule, FAST_PATH_LAYERS):
                self._wrap_forward(submodule)
            elif isinstance(submodule, torch._dynamo.OptimizedModule):
                self._hook(submodule)
            elif submodule._compiled_call_impl is not None:
                self._wrap_call(submodule, submodule._compiled_call_impl)
            elif isinstance(submodule, torch.jit.ScriptModule) or _has_experts(submodule):
                self._wrap_call(submodule, submodule._call_impl)
            else:
                continue
            self._hooked.add(submodule)

    def _keep_layout(self, module: nn.Module) -> None:
        """Keep a 4-bit layer of bitsandbytes from packing its weight anew for AVX-512: its chunk has another shape."""
        attributes: dict[str, Any] = vars(module)
        if attributes.get("support_avx512bf16_for_cpu"):
            attributes["support_avx512bf16_for_cpu"] = False
            self._undo.append(lambda: attributes.update(support_avx512bf16_for_cpu=True))

    def _hook(self, module: nn.Module) -> None:
        uses: list[ModuleUse] = []

        def before_call(layer: nn.Module, args: Any, kwargs: Any) -> None:
            if layer is module:  # a deep copy has the hooks too, but is not managed
                uses.append(open_module_window(self.interceptor, _managed_params_of(module), (args, kwargs)))

        def after_call(layer: nn.Module, args: Any, out: Any) -> None:
            if layer is module and uses:
                close_module_window(self.interceptor, uses.pop(), out)

        self._undo.append(module.register_forward_pre_hook(EngineHook(before_call), with_kwargs=True).remove)
        self._undo.append(module.register_forward_hook(EngineHook(after_call), always_call=True).remove)

    def _hook_generation(self, module: nn.Module) -> None:
        """Plan each forward that the module's `generate` calls, by whatever path: see `Residency.evaluation`."""
        residency, lock = self.interceptor.data.residency, self.interceptor.lock
        opened: dict[int, ExitStack] = {}

        def before_call(layer: nn.Module, args: Any, kwargs: Any) -> None:
            if layer is module and not torch.is_grad_enabled() and get_ident() not in opened:
                with ExitStack() as stack:
                    with deferring_sigint():
                        stack.enter_context(lock)
                        if plans := residency.may_plan:
                            stack.enter_context(residency.evaluation((id(module), _input_shape(args, kwargs))))
                    if plans:
                        opened[get_ident()] = stack.pop_all()

        def after_call(layer: nn.Module, args: Any, out: Any) -> None:
            with deferring_sigint():
                if layer is module and (stack := opened.pop(get_ident(), None)) is not None:
                    stack.close()

        self._undo.append(module.register_forward_pre_hook(EngineHook(before_call), with_kwargs=True).remove)
        self._undo.append(module.register_forward_hook(EngineHook(after_call), always_call=True).remove)

    def _explain_allocation(self, module: Any) -> None:
        """Let peft's AdaLoRA say what it needs: it reads gradients after the step, which has used them up."""
        allocate: Callable[..., Any] = module.update_and_allocate

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return allocate(*args, **kwargs)
            except TypeError as error:
                trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
                names = [name for name, param in trained if param.grad is None]
                if not names:
                    raise
                raise TrainingError(
                    f"update_and_allocate reads the gradient of {names[0]!r}, which optimizer.step() has used up: "
                    f"clone the adapters' gradients before the step, assign the copies to parameter.grad after it, and "
                    f"call optimizer.zero_grad() after update_and_allocate"
                ) from error

        self.replace_attribute(module, "update_and_allocate", WrappedMethod(module, "update_and_allocate", call))

    def _wrap_call(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Wrap the call with its hooks, in which a module may exchange tokens: `module.compile()` compiles them too."""
        attributes, compiled = vars(module), module._compiled_call_impl  # a traced module has attributes elsewhere, too
        attributes["_compiled_call_impl"] = lambda *args, **kwargs: self._in_window(module, call, args, kwargs)
        self._undo.append(lambda: attributes.update(_compiled_call_impl=compiled))

    def _wrap_forward(self, layer: nn.Module) -> None:
        """Wrap `forward` of a layer that takes a fast path in inference.

        Hooks would not do: `nn.TransformerEncoderLayer` takes another code path, with other bits, if it or a module in
        it has hooks.
        """
        forward = layer.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if layer.training or torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return self._in_window(layer, forward, args, kwargs)

        self.replace_attribute(layer, "forward", WrappedMethod(layer, "forward", call))

    def _wrap_apply(self, module: nn.Module) -> None:
        """Let moves of a module, as by `to`, pass over parameters that they do not change.

        `nn.Module._apply` reads the gradient of each parameter, for which all processes have to average it first. A
        forward may contain such a move, as that of a router of Switch Transformers does, and backward may recompute it.
        """
        apply: Callable[..., Any] = module._apply

        def apply_to_moved(fn: Callable[[Any], Any], recurse: bool = True) -> Any:
            params = module._parameters
            with torch.no_grad():
                moved = {
                    name: param
                    for name, param in params.items()
                    if not hasattr(param, "_managed_params") or fn(param) is not param
                }
            module._parameters = moved
            try:
                return apply(fn, recurse)
            finally:
                params.update(moved)
                module._parameters = params

        self.replace_attribute(module, "_apply", WrappedMethod(module, "_apply", apply_to_moved))

    def _in_window(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function in a window of all parameters of a module."""
        with deferring_sigint():
            use = open_module_window(self.interceptor, _managed_params_of(module), (args, kwargs))
            try:
                with interruptible():
                    out = function(*args, **kwargs)
            except BaseException:
                abandon_module_window(self.interceptor, use)
                raise
            close_module_window(self.interceptor, use, out)
            return out

    def replace_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Use `value` in place of a module's own method or attribute of this name."""
        attributes = vars(module)
        if name in attributes:  # the user has replaced it already
            self._undo.append(partial(attributes.__setitem__, name, attributes[name]))
        else:
            self._undo.append(partial(attributes.pop, name, None))
        attributes[name] = value
