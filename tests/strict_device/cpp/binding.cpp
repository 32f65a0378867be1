// Python binding of the strict device.
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "workspaces.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  strict::register_device();
  m.attr("DEVICES") = strict::kDevices;
  m.def(
      "configure",
      [](size_t capacity, size_t segment_bytes, size_t small_bytes, size_t workspace_bytes, uint64_t seed, double up_rate,
         double down_rate) {
        strict::free_workspaces();
        strict::configure({capacity, segment_bytes, small_bytes, workspace_bytes, seed, up_rate, down_rate});
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("register_host", [](size_t address, size_t nbytes) {
    strict::register_host(reinterpret_cast<void*>(address), nbytes);
  });
  m.def("unregister_host", [](size_t address) { strict::unregister_host(reinterpret_cast<void*>(address)); });
  m.def("set_limit", &strict::set_limit);
  m.def("free_workspaces", &strict::free_workspaces);
  m.def("charge", &strict::charge);
  m.def("set_worker_thread", &strict::set_worker_thread);
  m.def("host_waits", [] {
    auto waits = strict::host_waits();
    py::dict found;
    found["event"] = waits.event;
    found["stream"] = waits.stream;
    found["copy"] = waits.copy;
    found["op"] = waits.op;
    return found;
  });
  m.def("copied_bytes", &strict::copied_bytes);
  m.def("set_in_collective", &strict::set_in_collective);
  m.def("reset_host_waits", &strict::reset_host_waits);
  m.def("pending_tasks", &strict::pending_tasks);
  m.def("seed", [](int index, uint64_t seed) {
    at::Generator(strict::generator(static_cast<c10::DeviceIndex>(index))).set_current_seed(seed);
  });
  m.def("get_state", [](int index) { return strict::generator(static_cast<c10::DeviceIndex>(index)).get_state(); });
  m.def("set_state", [](int index, const at::Tensor& state) {
    at::Generator(strict::generator(static_cast<c10::DeviceIndex>(index))).set_state(state);
  });
}
