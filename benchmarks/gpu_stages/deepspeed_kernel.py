"""DeepSpeed's update on the host: its import compiles the kernel, which takes up to a minute, before the turn."""

from deepspeed.ops.op_builder import CPUAdamBuilder

CPUAdamBuilder().load(verbose=False)
