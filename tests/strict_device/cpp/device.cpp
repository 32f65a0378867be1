// The strict device's guard, allocators and hooks: what PyTorch's generic code calls.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace strict {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current_index = 0;
thread_local std::array<int64_t, kDevices> current_streams{};

struct Event {
  MarkerPtr marker;
  bool timed = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_index}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "there is no device ", device);
    current_index = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_index = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_streams[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, new_stream(index(device)));
  }
  c10::Stream exchangeStream(c10::Stream changed) const override {
    auto before = getStream(changed.device());
    current_streams[changed.device_index()] = changed.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event;
    auto* recorded = static_cast<Event*>(*event);
    recorded->marker = strict::record(stream.device_index(), stream.id());
    recorded->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *first = static_cast<Event*>(from), *second = static_cast<Event*>(to);
    TORCH_CHECK(first->timed && second->timed, "events without timing have no time");
    double from_s = passed_at_s(first->marker), to_s = passed_at_s(second->marker);
    TORCH_CHECK(from_s >= 0 && to_s >= 0, "an event has not passed");
    return 1e3 * (to_s - from_s);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_waits(stream.device_index(), stream.id(), static_cast<Event*>(event)->marker);
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(static_cast<Event*>(event)->marker); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(stream.device_index(), stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream.device_index(), stream.id());
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(static_cast<Event*>(event)->marker);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize_device(index); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() != nullptr) record_use(data.get(), stream.id());
  }

 private:
  static c10::DeviceIndex index(c10::Device device) { return device.has_index() ? device.index() : current_index; }
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index(device)), id);
  }
};

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device{kType, current_index};
    if (nbytes == 0) return {nullptr, nullptr, &deallocate, device};
    try {
      void* address = strict::allocate(current_index, current_streams[current_index], nbytes);
      return {address, address, &deallocate, device};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    queue_copy(target, source, nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() != nullptr) record_use(data.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    auto found = memory_stats(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& allocated = stats.allocated_bytes[0];
    allocated.current = static_cast<int64_t>(found.allocated);
    allocated.peak = static_cast<int64_t>(found.allocated_peak);
    stats.reserved_bytes[0].current = static_cast<int64_t>(found.reserved);
    stats.reserved_bytes[0].peak = static_cast<int64_t>(found.reserved_peak);
    stats.inactive_split_bytes[0].current = static_cast<int64_t>(found.inactive_split);
    stats.num_alloc_retries = static_cast<int64_t>(found.retries);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { reset_peak(index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return {capacity() - memory_stats(index).reserved, capacity()};
  }
};

// Page-locked memory of PyTorch: it is freed once no queued copy uses it.
struct PinnedMemory final : c10::Allocator {
  struct Context {
    void* address;
    size_t nbytes;
  };
  static void release(void* pointer) {
    auto* context = static_cast<Context*>(pointer);
    when_not_pending(context->address, context->nbytes, [context] {
      unregister_host(context->address);
      std::free(context->address);
      delete context;
    });
  }
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::DeviceType::CPU};
    void* address = std::aligned_alloc(512, (nbytes + 511) / 512 * 512);
    register_host(address, nbytes);
    return {address, new Context{address, nbytes}, &release, c10::DeviceType::CPU};
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kType, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, current_index}; }
  bool isPinnedPtr(const void* address) const override { return is_registered(address, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = device_memory.allocate(nbytes);
    queue_copy(fresh.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

}  // namespace

c10::Stream current_stream(c10::DeviceIndex index) { return Guard().getStream({kType, index}); }

const at::Generator& generator(c10::DeviceIndex index) {
  static std::array<at::Generator, kDevices> generators{at::detail::createCPUGenerator(),
                                                        at::detail::createCPUGenerator()};
  return generators[index < 0 ? current_index : index];
}

void queue_copy(void* target, const void* source, size_t nbytes) {
  if (nbytes == 0) return;
  char *to = kernel_address(target), *from = kernel_address(source);
  enqueue(current_index, current_streams[current_index], [=] { std::memcpy(to, from, nbytes); });
}

c10::Allocator* device_allocator() { return &device_memory; }

void register_device() {
  c10::SetAllocator(kType, &device_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace strict
