"""Machines of dry runs: without a GPU, and with one and a disk."""

from patrickstar._perf_model.machine_spec import DiskDrive, Gpu, Host, Links, Machine, Network

_CORES = Host(memory="64GiB", memory_bandwidth="20GB", cores=2, matmul_tflops=0.2)
LAPTOP = Machine(name="laptop", source="made up", host=_CORES)
DESKTOP = Machine(
    name="desktop",
    source="made up",
    gpu=Gpu(count=1, memory="1GiB", matmul_tflops=10, memory_bandwidth="1TB"),
    host=Host(memory="64GiB", memory_bandwidth="20GB", cores=2),
    links=Links(h2d="1GB", d2h="1GB"),
    disk=DiskDrive(capacity="100GB", read="1GB", write="1GB"),
)

CPU = Machine(name="cpu", source="a test", host=Host(memory=1 << 30, memory_bandwidth=800, cores=4, matmul_tflops=1))
NODE = Machine(
    name="node",
    source="a test",
    gpu=Gpu(count=4, memory=1 << 30, matmul_tflops=1, memory_bandwidth=1000),
    host=Host(memory=1 << 30, memory_bandwidth=800, cores=4),
    links=Links(h2d=50, d2h=40, gpu_gpu=100),
    network=Network(bandwidth=20, latency_s=0.5),
)
