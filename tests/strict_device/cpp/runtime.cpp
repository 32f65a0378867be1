#include <atomic>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "queues.h"

namespace strict {

std::recursive_mutex mutex;
Settings settings;
std::exception_ptr failure;
Device devices[kDevices];

namespace {

// Queries after which an event has passed: a thread that polls for it waits for the device.
constexpr int kQueries = 100;

std::mt19937_64 schedule{0};
HostWaits waits;
thread_local bool worker_thread = false;

double draw() { return std::uniform_real_distribution<double>(0, 1)(schedule); }

double draw_eagerness() {
  const double choices[] = {0, 0, 0.2, 1};
  return choices[schedule() % 4];
}

std::map<char*, size_t> registered;
std::vector<HostRange> pending_ranges;
std::vector<std::pair<HostRange, Task>> deferred;

void run_until(const MarkerPtr& marker);

// Run the first entry of a queue; if it waits for another stream, run that stream first, or return false.
bool run_front(Queue& queue, bool force) {
  Entry& front = queue.entries.front();
  if (front.wait && !front.wait->passed) {
    if (!force) return false;
    run_until(front.wait);
  }
  Entry entry = std::move(queue.entries.front());
  queue.entries.pop_front();
  try {
    if (entry.task) entry.task();
  } catch (...) {
    if (!failure) failure = std::current_exception();
  }
  if (entry.record) pass(*entry.record);
  return true;
}

void run_until(const MarkerPtr& marker) {
  if (settings.timed()) await(marker);
  while (!marker->passed) run_front(*marker->queue, true);
}

void run_all(Queue& queue) {
  if (settings.timed()) return await(record(queue.device, queue.id));
  while (!queue.entries.empty()) run_front(queue, true);
}

void count(int64_t HostWaits::*counter) {
  if (!worker_thread) ++(waits.*counter);
}

std::deque<Queue*> queues_of(Device& device) {
  std::deque<Queue*> found;
  for (auto& queue : device.queues) found.push_back(queue.get());
  return found;
}

void release_range(HostRange range) {
  auto same = [&](const HostRange& other) {
    return other.begin == range.begin && other.nbytes == range.nbytes && other.write == range.write;
  };
  pending_ranges.erase(std::find_if(pending_ranges.begin(), pending_ranges.end(), same));
  for (size_t i = 0; i < deferred.size();) {
    if (has_pending(deferred[i].first.begin, deferred[i].first.nbytes)) {
      ++i;
      continue;
    }
    Task action = std::move(deferred[i].second);
    deferred.erase(deferred.begin() + i);
    action();
  }
}

}  // namespace

Device& device(int index) {
  Device& found = devices[index];
  if (found.guarded == nullptr) {
    found.file = memfd_create("strict-device", 0);
    if (found.file < 0 || ftruncate(found.file, kSpace) != 0) throw std::runtime_error("memfd_create failed");
    auto map = [&](int access) {
      void* address = mmap(nullptr, kSpace, access, MAP_SHARED | MAP_NORESERVE, found.file, 0);
      if (address == MAP_FAILED) throw std::runtime_error("mmap failed");
      madvise(address, kSpace, MADV_DONTFORK);
      return static_cast<char*>(address);
    };
    found.guarded = map(PROT_NONE);
    found.kernel = map(PROT_READ | PROT_WRITE);
    found.queues.push_back(std::make_unique<Queue>());
    found.queues[0]->device = index;
    found.queues[0]->eagerness = draw_eagerness();
  }
  return found;
}

Queue& queue(int index, int64_t stream) { return *device(index).queues.at(stream); }

void raise_failure() {
  if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
}

void progress() {
  if (settings.timed()) return;
  for (Device& each : devices) {
    for (auto& queue : each.queues) {
      while (!queue->entries.empty() && draw() < queue->eagerness && run_front(*queue, false)) {
      }
    }
  }
}

void run_everything(Device& device) {
  if (settings.timed()) return await_all(queues_of(device));
  for (auto& queue : device.queues) run_all(*queue);
}

void configure(const Settings& changed) {
  std::lock_guard lock(mutex);
  for (Device& each : devices) {
    run_everything(each);
    release_segments(each);
  }
  const bool was_timed = std::exchange(settings, changed).timed();
  schedule.seed(changed.seed);
  for (Device& each : devices) {
    if (was_timed && !settings.timed()) await_threads(queues_of(each));
    for (auto& queue : each.queues) queue->eagerness = draw_eagerness();
  }
}

bool is_timed() { return settings.timed(); }

void register_host(void* address, size_t nbytes) {
  std::lock_guard lock(mutex);
  auto* begin = static_cast<char*>(address);
  auto after = registered.lower_bound(begin + nbytes);
  if (after != registered.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second > begin) throw std::runtime_error("host memory is already registered");
  }
  registered[begin] = nbytes;
}

void unregister_host(void* address) {
  std::lock_guard lock(mutex);
  auto found = registered.find(static_cast<char*>(address));
  if (found == registered.end()) throw std::runtime_error("host memory is not registered");
  if (has_pending(address, found->second)) throw std::runtime_error("host memory is unregistered while a copy uses it");
  registered.erase(found);
}

bool is_registered(const void* address, size_t nbytes) {
  std::lock_guard lock(mutex);
  auto* begin = const_cast<char*>(static_cast<const char*>(address));
  auto after = registered.upper_bound(begin);
  if (after == registered.begin()) return false;
  auto before = std::prev(after);
  return begin + nbytes <= before->first + before->second;
}

bool has_pending(const void* address, size_t nbytes) {
  std::lock_guard lock(mutex);
  auto* begin = static_cast<const char*>(address);
  return std::any_of(pending_ranges.begin(), pending_ranges.end(), [&](const HostRange& range) {
    return range.begin < begin + nbytes && begin < range.begin + range.nbytes;
  });
}

void when_not_pending(void* address, size_t nbytes, Task action) {
  std::lock_guard lock(mutex);
  if (has_pending(address, nbytes)) {
    deferred.push_back({{static_cast<char*>(address), nbytes, false}, std::move(action)});
  } else {
    action();
  }
}

int64_t new_stream(int index) {
  std::lock_guard lock(mutex);
  Device& found = device(index);
  auto created = std::make_unique<Queue>();
  created->device = index;
  created->id = static_cast<int64_t>(found.queues.size());
  created->eagerness = draw_eagerness();
  found.queues.push_back(std::move(created));
  return found.queues.back()->id;
}

void enqueue(int index, int64_t stream, Task task, Link link, size_t nbytes) {
  std::lock_guard lock(mutex);
  raise_failure();
  double seconds = charge(0);
  if (link != Link::none && settings.timed()) {
    seconds = static_cast<double>(nbytes) / (link == Link::up ? settings.up_rate : settings.down_rate);
  }
  push(queue(index, stream), {std::move(task), nullptr, nullptr, seconds, link});
  progress();
}

void enqueue_copy(int index, int64_t stream, HostRange host, Task task) {
  std::lock_guard lock(mutex);
  pending_ranges.push_back(host);
  auto run = [host, task = std::move(task)] {
    task();
    std::lock_guard lock(mutex);
    release_range(host);
  };
  enqueue(index, stream, std::move(run), host.write ? Link::down : Link::up, host.nbytes);
}

void pass(Marker& marker) {
  marker.passed_at_s = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  marker.passed = true;
}

double passed_at_s(const MarkerPtr& marker) {
  std::lock_guard lock(mutex);
  return marker && marker->passed ? marker->passed_at_s : -1;
}

MarkerPtr record(int index, int64_t stream) {
  std::lock_guard lock(mutex);
  Queue& found = queue(index, stream);
  auto marker = std::make_shared<Marker>();
  marker->queue = &found;
  if (found.entries.empty()) {
    pass(*marker);
  } else {
    push(found, {nullptr, nullptr, marker});
  }
  return marker;
}

void stream_waits(int index, int64_t stream, const MarkerPtr& marker) {
  std::lock_guard lock(mutex);
  if (marker && !marker->passed) push(queue(index, stream), {nullptr, marker});
}

bool query(const MarkerPtr& marker) {
  std::lock_guard lock(mutex);
  progress();
  if (marker && !marker->passed && !settings.timed() && ++marker->queries >= kQueries) {
    count(&HostWaits::event);
    run_until(marker);
  }
  return !marker || marker->passed;
}

bool query_stream(int index, int64_t stream) {
  std::lock_guard lock(mutex);
  progress();
  return queue(index, stream).entries.empty();
}

void synchronize(const MarkerPtr& marker) {
  std::lock_guard lock(mutex);
  if (marker && !marker->passed) {
    count(&HostWaits::event);
    run_until(marker);
  }
  raise_failure();
}

void synchronize_stream(int index, int64_t stream) { drain(index, stream, &HostWaits::stream); }

void synchronize_device(int index) {
  std::lock_guard lock(mutex);
  Device& found = device(index);
  if (std::any_of(found.queues.begin(), found.queues.end(), [](auto& each) { return !each->entries.empty(); })) {
    count(&HostWaits::stream);
  }
  run_everything(found);
  raise_failure();
}

void drain(int index, int64_t stream, int64_t HostWaits::*counter) {
  std::lock_guard lock(mutex);
  Queue& found = queue(index, stream);
  if (!found.entries.empty()) {
    count(counter);
    run_all(found);
  }
  raise_failure();
}

HostWaits host_waits() {
  std::lock_guard lock(mutex);
  return waits;
}

void reset_host_waits() {
  std::lock_guard lock(mutex);
  waits = HostWaits{};
}

std::atomic<int64_t> copied{0};
thread_local bool in_collective = false;

void count_copied(size_t nbytes) {
  if (!in_collective) copied += static_cast<int64_t>(nbytes);
}

int64_t copied_bytes() { return copied; }

void set_in_collective(bool is_in_collective) { in_collective = is_in_collective; }

void set_worker_thread(bool is_worker) { worker_thread = is_worker; }

int64_t pending_tasks() {
  std::lock_guard lock(mutex);
  int64_t total = 0;
  for (Device& each : devices) {
    for (auto& queue : each.queues) total += static_cast<int64_t>(queue->entries.size());
  }
  return total;
}

}  // namespace strict
