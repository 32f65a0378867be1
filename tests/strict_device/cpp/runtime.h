// Memory, streams and events of the strict device, without PyTorch. See [Note: strict device] in __init__.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace strict {

constexpr int kDevices = 2;

// Thrown when an allocation exceeds a device's capacity.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Settings {
  size_t capacity = size_t{1} << 30;
  size_t segment_bytes = 0;  // 0: each block has its own segment, so that memory does not fragment
  size_t small_bytes = 0;    // segments expand page by page; largest block of the small pool. 0: they don't
  size_t workspace_bytes = 0;  // of products of matrices, for each thread and stream
  uint64_t seed = 0;         // of the schedule by which queued work runs
  // Rates of copies in timed mode, in bytes per second. 0: work runs by the schedule, and takes no time.
  double up_rate = 0, down_rate = 0;

  bool timed() const { return up_rate > 0; }
};

struct MemoryStats {
  size_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0, inactive_split = 0, retries = 0;
  size_t limit = SIZE_MAX;  // of what is reserved
};

// Waits of a thread for unfinished work, by what it called.
struct HostWaits {
  int64_t event = 0, stream = 0, copy = 0, op = 0;
};

using Task = std::function<void()>;

struct Marker;
using MarkerPtr = std::shared_ptr<Marker>;

// Settings apply to later work; all queued work runs first.
void configure(const Settings& settings);
bool is_timed();

// Memory of a device. Addresses are inaccessible to the host; kernels access them at `kernel_address`.
void* allocate(int device, int64_t stream, size_t nbytes);
void deallocate(void* address);
void record_use(void* address, int64_t stream);
bool is_device_address(const void* address);
char* kernel_address(const void* address);
void empty_cache();
MemoryStats memory_stats(int device);
void reset_peak(int device);
void set_limit(int device, size_t nbytes);
size_t capacity();

// Page-locked host memory.
void register_host(void* address, size_t nbytes);
void unregister_host(void* address);
bool is_registered(const void* address, size_t nbytes);

// Host memory of queued copies.
struct HostRange {
  const char* begin;
  size_t nbytes;
  bool write;
};
bool has_pending(const void* address, size_t nbytes);
void when_not_pending(void* address, size_t nbytes, Task action);

// Streams. Work is queued and runs when a thread waits for it, or by the schedule.
int64_t new_stream(int device);
// In timed mode an entry takes the seconds that its thread has been charged, a copy those of its bytes on its link.
enum class Link { none, up, down };
double charge(double seconds);  // returns what was not taken of the last charge
void enqueue(int device, int64_t stream, Task task, Link link = Link::none, size_t nbytes = 0);
void enqueue_copy(int device, int64_t stream, HostRange host, Task task);
MarkerPtr record(int device, int64_t stream);
double passed_at_s(const MarkerPtr& marker);  // on the host's clock; negative if it has not passed
void stream_waits(int device, int64_t stream, const MarkerPtr& marker);
bool query(const MarkerPtr& marker);
bool query_stream(int device, int64_t stream);
void synchronize(const MarkerPtr& marker);
void synchronize_stream(int device, int64_t stream);
void synchronize_device(int device);

// Run all work of a stream for an operator or a blocking copy; count it as `waits.*counter` if there was any.
void drain(int device, int64_t stream, int64_t HostWaits::*counter);
HostWaits host_waits();
void reset_host_waits();
void set_worker_thread(bool is_worker);
int64_t pending_tasks();

// Bytes copied between host and device, but for small values and what threads copy inside of collectives.
void count_copied(size_t nbytes);
int64_t copied_bytes();
void set_in_collective(bool is_in_collective);

}  // namespace strict
