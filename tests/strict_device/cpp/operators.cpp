// Operators of the strict device: each queues the CPU's kernel on the current stream, for memory that it names by
// address. Closures never hold tensors: these would keep memory alive, and hide that it was freed too early.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <optional>

#include "device.h"
#include "workspaces.h"

namespace strict {
namespace {

using Stack = torch::jit::Stack;

// A tensor by its address, with no hold on its memory.
struct Description {
  char* address = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype{};

  explicit Description(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()), strides(tensor.strides().vec()), dtype(tensor.scalar_type()) {
    if (tensor.numel() != 0) {
      address = kernel_address(static_cast<const char*>(tensor.storage().data())) +
                tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
    }
  }

  at::Tensor on_cpu() const {
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    if (address == nullptr) return at::empty_strided(sizes, strides, options);
    return at::from_blob(address, sizes, strides, [](void*) {}, options, at::kCPU);
  }
};

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// Runs kernels below autograd and below all modes of the calling thread.
struct KernelGuard {
  c10::impl::ForceDispatchKeyGuard guard{c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
                                         c10::default_excluded_set |
                                             c10::autograd_dispatch_keyset_with_ADInplaceOrView};

  // Any thread may run a kernel. With another number of threads some libraries give other bits.
  KernelGuard() {
    thread_local const bool initialized = (at::init_num_threads(), true);
    (void)initialized;
  }
};

// Apply a function to every tensor of a value.
template <class Function>
c10::IValue map_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    auto tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(function(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(function(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      mapped.push_back(tensor.has_value() && tensor->defined() ? std::optional(function(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  map_tensors(value, [&](const at::Tensor& tensor) {
    found.push_back(tensor);
    return tensor;
  });
  return found;
}

// An argument without hold on device memory.
struct Argument {
  c10::IValue value;                      // with placeholders for device tensors
  std::vector<std::optional<Description>> tensors;  // of the device, in order; none for a tensor of the host

  explicit Argument(const c10::IValue& given) {
    value = map_tensors(given, [&](const at::Tensor& tensor) {
      bool queued = on_device(tensor);
      tensors.push_back(queued ? std::optional(Description(tensor)) : std::nullopt);
      return queued ? at::empty({0}, at::kCPU) : tensor.clone();
    });
  }

  c10::IValue on_cpu() const {
    size_t number = 0;
    return map_tensors(value, [&](const at::Tensor& tensor) {
      const auto& description = tensors[number++];
      return description.has_value() ? description->on_cpu() : tensor;
    });
  }
};

c10::Device device_of(const c10::OperatorHandle& op, const Stack& stack) {
  for (const auto& value : stack) {
    for (const auto& tensor : tensors_of(value)) {
      if (on_device(tensor)) return tensor.device();
    }
    if (value.isDevice()) return value.toDevice();
  }
  TORCH_CHECK(false, op.schema(), ": no argument is on the strict device");
}

// Accelerators round square roots correctly. On a CPU, PyTorch calls a vector library that does not.
void rounded_sqrt(const Stack& arguments) {
  auto values = arguments[0].toTensor(), out = arguments[1].toTensor();
  out.copy_(values.scalar_type() == at::kFloat ? values.to(at::kDouble).sqrt() : values.sqrt());
}

Stack call_cpu(const c10::OperatorHandle& op, const std::vector<Argument>& arguments) {
  KernelGuard guard;
  Stack stack;
  for (const auto& argument : arguments) stack.push_back(argument.on_cpu());
  if (op.schema().name() == "aten::sqrt" && op.schema().overload_name() == "out") {
    rounded_sqrt(stack);
  } else {
    op.callBoxed(&stack);
  }
  return stack;
}

bool needs_generator(const c10::OperatorHandle& op) {
  for (const auto& argument : op.schema().arguments()) {
    if (argument.name() == "generator") return true;
  }
  return false;
}

// Return the results of an operator on meta tensors, if their shapes don't depend on data.
std::optional<Stack> meta_results(const c10::OperatorHandle& op, const Stack& stack) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
  KernelGuard guard;
  Stack meta;
  for (const auto& value : stack) {
    if (value.isDevice()) {
      meta.push_back(c10::Device(c10::DeviceType::Meta));
      continue;
    }
    meta.push_back(map_tensors(value, [](const at::Tensor& tensor) {
      return on_device(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta))
                               : tensor;
    }));
  }
  try {
    op.callBoxed(&meta);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
  return meta;
}

at::Tensor like(const at::Tensor& shape, c10::Device device) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

void copy_results(const std::vector<std::optional<Description>>& targets, const c10::IValue& result) {
  size_t number = 0;
  for (const auto& tensor : tensors_of(result)) {
    const auto& target = targets[number++];
    TORCH_CHECK(target->sizes == tensor.sizes().vec(), "a kernel's result differs from its meta shape");
    target->on_cpu().copy_(tensor);
  }
}

std::vector<Argument> arguments_of(const Stack& given) {
  std::vector<Argument> arguments;
  for (const auto& value : given) arguments.emplace_back(value);
  return arguments;
}

// Queue an operator whose results are new tensors, of the shapes of meta tensors.
Stack queue_functional(const c10::OperatorHandle& op, std::vector<Argument> arguments, const Stack& shapes,
                       c10::Device device) {
  Stack outputs;
  std::vector<std::vector<std::optional<Description>>> targets;
  for (const auto& shape : shapes) {
    outputs.push_back(map_tensors(shape, [&](const at::Tensor& tensor) { return like(tensor, device); }));
    targets.push_back(Argument(outputs.back()).tensors);
  }
  enqueue(device.index(), current_stream(device.index()).id(),
          [op, arguments = std::move(arguments), targets = std::move(targets)] {
            auto results = call_cpu(op, arguments);
            KernelGuard guard;
            for (size_t i = 0; i < results.size(); ++i) copy_results(targets[i], results[i]);
          });
  return outputs;
}

// Queue an operator, or run it at once if its result's shape or the generator's state depends on what came before.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Stack given(stack->end() - static_cast<long>(count), stack->end());
  auto device = device_of(op, given);
  auto stream = current_stream(device.index());
  use_workspaces(op, given, device.index(), stream.id());
  std::vector<size_t> written;
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      written.push_back(i);
    } else {
      TORCH_CHECK(alias == nullptr, schema, " returns a view: the strict device has to register it");
    }
  }
  if (needs_generator(op)) {
    for (size_t i = 0; i < count; ++i) {
      if (schema.arguments()[i].name() == "generator") {
        if (given[i].isNone()) given[i] = generator(device.index());
      }
    }
  }
  TORCH_CHECK(needs_generator(op) || !op.hasTag(at::Tag::nondeterministic_seeded), schema,
              " draws from a generator that it does not name: the strict device has to register it");
  const bool in_place = !written.empty();
  if (in_place) {  // outputs without elements take the shape of the result
    bool empty = false, other = false, elements = false;
    for (size_t i = 0; i < count; ++i) {
      bool output = std::find(written.begin(), written.end(), i) != written.end();
      for (const auto& tensor : tensors_of(given[i])) {
        if (output) {
          empty |= tensor.numel() == 0;
        } else {
          other = true, elements |= tensor.numel() != 0;
        }
      }
    }
    if (empty && (elements || !other)) {
      if (auto results = meta_results(op, given)) {
        size_t number = 0;
        for (size_t i : written) {
          if (number >= results->size()) break;
          auto shapes = tensors_of((*results)[number++]);
          auto outputs = tensors_of(given[i]);
          for (size_t k = 0; k < std::min(shapes.size(), outputs.size()); ++k) {
            if (outputs[k].sizes() != shapes[k].sizes()) outputs[k].resize_(shapes[k].sizes());
          }
        }
      }
    }
  }
  auto arguments = arguments_of(given);
  std::optional<Stack> shapes;
  if (!in_place && !needs_generator(op)) shapes = meta_results(op, given);
  torch::jit::drop(*stack, count);
  if (in_place) {
    auto task = [op, arguments = std::move(arguments)] { call_cpu(op, arguments); };
    if (needs_generator(op)) {  // draws in the order of the calls
      drain(device.index(), stream.id(), &HostWaits::op);
      task();
    } else {
      enqueue(device.index(), stream.id(), std::move(task));
    }
    for (size_t i = 0; i < schema.returns().size(); ++i) stack->push_back(given[written[i]]);
    return;
  }
  if (shapes.has_value()) {
    for (auto& output : queue_functional(op, std::move(arguments), *shapes, device)) stack->push_back(output);
    return;
  }
  drain(device.index(), stream.id(), &HostWaits::op);
  for (const auto& result : call_cpu(op, arguments)) {
    auto output = map_tensors(result, [&](const at::Tensor& tensor) { return like(tensor, device); });
    auto targets = Argument(output).tensors;
    drain(device.index(), stream.id(), &HostWaits::op);  // the poison of reused memory
    KernelGuard guard;
    copy_results(targets, result);
    stack->push_back(std::move(output));
  }
}

// Memory and views

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(c10::DeviceType::PrivateUse1)));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(c10::DeviceType::PrivateUse1)));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format.has_value() || *format == at::MemoryFormat::Contiguous, "resize_ to another memory format");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.numel() != 0 && needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_view(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                     at::IntArrayRef stride) {
  auto contiguous = c10::contiguous_strides(size);
  auto strides = stride.empty() && !size.empty() ? at::IntArrayRef(contiguous) : stride;
  size_t needed = at::detail::computeStorageNbytes(size, strides, self.dtype().itemsize(), offset);
  TORCH_CHECK(at::multiply_integers(size) == 0 || needed <= source.nbytes(), "set_ would take ", needed,
              " bytes of a storage of ", source.nbytes(), " bytes, and allocate memory");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_view(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_view(self, at::empty({0}, self.options()).storage(), 0, {0}, {1});
}

// Copies

bool dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  bool alike = source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() &&
               source.strides() == target.strides() && dense(source);
  auto copy = [from = Description(source), to = Description(target), alike] {
    KernelGuard guard;
    auto on_cpu = to.on_cpu();
    if (alike)  // in this thread: a simulated link takes no core from updates beyond its own
      std::memcpy(on_cpu.data_ptr(), from.on_cpu().data_ptr(), on_cpu.nbytes());
    else
      on_cpu.copy_(from.on_cpu());
  };
  const auto& on = on_device(target) ? target : source;
  const auto& host = on_device(target) ? source : target;
  auto index = on.device().index();
  auto stream = current_stream(index).id();
  if (on_device(source) && on_device(target)) {
    auto other = source.device().index();
    if (other != index) stream_waits(index, stream, record(other, current_stream(other).id()));
    enqueue(index, stream, copy);
    if (other != index) stream_waits(other, current_stream(other).id(), record(index, stream));
    return target;
  }
  auto* begin = static_cast<char*>(host.data_ptr());
  size_t nbytes = at::detail::computeStorageNbytes(host.sizes(), host.strides(), host.element_size());
  if (nbytes > 256) count_copied(nbytes);
  bool locked = is_registered(begin, nbytes);
  if (non_blocking && locked && alike) {
    bool write = on_device(source);
    if (write && !is_timed() && !has_pending(begin, nbytes)) std::memset(begin, 0xFF, nbytes);
    enqueue_copy(index, stream, {begin, nbytes, write}, copy);
    return target;
  }
  if (on_device(target) && (host.numel() == 1 || nbytes <= 256)) {  // small values travel with the launch
    auto value = host.detach().clone();
    enqueue(index, stream, [value, to = Description(target)] {
      KernelGuard guard;
      to.on_cpu().copy_(value);
    });
    return target;
  }
  enqueue(index, stream, copy, on_device(target) ? Link::up : Link::down, nbytes);
  drain(index, stream, &HostWaits::copy);
  return target;
}

at::Scalar item(const at::Tensor& self) {
  drain(self.device().index(), current_stream(self.device().index()).id(), &HostWaits::op);
  KernelGuard guard;
  return Description(self).on_cpu().item();
}

void record_stream(at::Tensor& self, at::Stream stream) {
  if (self.storage().data() != nullptr) record_use(const_cast<void*>(self.storage().data()), stream.id());
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

// Its composite form keeps statistics in another dtype than the CPU's backward expects.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_layer_norm(const at::Tensor& input, at::IntArrayRef shape,
                                                                 const std::optional<at::Tensor>& weight,
                                                                 const std::optional<at::Tensor>& bias, double eps) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_layer_norm", "");
  auto statistics = input.sizes().vec();
  std::fill(statistics.end() - static_cast<long>(shape.size()), statistics.end(), 1);
  bool mixed = weight.has_value() && weight->defined() && weight->scalar_type() != input.scalar_type();
  auto meta = input.options().device(at::kMeta);
  auto mean = at::empty(statistics, mixed ? meta.dtype(at::kFloat) : meta);
  auto results = queue_functional(op, arguments_of({input, shape.vec(), weight, bias, eps}),
                                  {at::empty(input.sizes(), meta), mean, mean}, input.device());
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// Allow `param.data = tensor` between the host and the device.
bool is_compatible(const at::Tensor& self, const at::Tensor& other) {
  auto allowed = [](const at::Tensor& tensor) { return tensor.is_cpu() || tensor.is_privateuseone(); };
  return allowed(self) && allowed(other);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_view);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_", &set_empty);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &native_dropout);
  m.impl("native_layer_norm", &native_layer_norm);
  m.impl("_has_compatible_shallow_copy_type", &is_compatible);
}

}  // namespace
}  // namespace strict
