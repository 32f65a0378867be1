// [Note: workspaces of a strict device]
// As PyTorch does for cuBLAS: the first product of matrices that a thread runs on a stream allocates a workspace, which is
// kept. It belongs to the thread's handle, and to the stream. A thread takes a handle that an ended thread has given back,
// or a new one. Products that add a vector, as cuBLASLt does, have a smaller workspace beside it.
#include "workspaces.h"

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "device.h"
#include "queues.h"

namespace strict {
namespace {

constexpr size_t kVectorShare = 32;  // of the workspace: 1 of 32 MiB on Hopper

// Never destroyed: threads may end when the process exits.
std::set<int>& given_back = *new std::set<int>;
auto& workspaces = *new std::map<std::tuple<int, int, int64_t, bool>, c10::DataPtr>;
int handles = 0;

// Handle of a thread, from its first product until its end.
struct Handle {
  int number;
  Handle() {
    std::lock_guard lock(mutex);
    number = given_back.empty() ? handles++ : given_back.extract(given_back.begin()).value();
  }
  ~Handle() {
    std::lock_guard lock(mutex);
    given_back.insert(number);
  }
};

}  // namespace

void use_workspaces(const c10::OperatorHandle& op, const torch::jit::Stack& arguments, int device, int64_t stream) {
  static const std::unordered_set<std::string> products{"aten::mm",    "aten::addmm",   "aten::bmm",  "aten::baddbmm",
                                                        "aten::addmv", "aten::addbmm", "aten::mv", "aten::_addmm_activation"};
  if (settings.workspace_bytes == 0 || products.count(op.schema().name()) == 0) return;
  thread_local const Handle handle;
  const bool adds_vector = op.schema().name() == "aten::addmm" && arguments[0].toTensor().dim() == 1;
  for (bool vector : {false, true}) {
    if (vector && !adds_vector) continue;
    std::lock_guard lock(mutex);
    auto& workspace = workspaces[{device, handle.number, stream, vector}];
    if (!workspace) workspace = device_allocator()->allocate(settings.workspace_bytes / (vector ? kVectorShare : 1));
  }
}

void free_workspaces() {
  std::lock_guard lock(mutex);
  workspaces.clear();
}

}  // namespace strict
