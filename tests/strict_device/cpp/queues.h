// Devices and the queues of their streams, shared by their memory (memory.cpp) and by the two ways of running queues: late
// by a schedule (runtime.cpp), or timed (timed.cpp).
#pragma once

#include <deque>
#include <exception>
#include <mutex>
#include <vector>

#include "runtime.h"

namespace strict {

struct Queue;

// A point in a stream; passed once all work before it has run.
struct Marker {
  bool passed = false;
  Queue* queue = nullptr;
  double passed_at_s = 0;  // on the clock of the host
  int queries = 0;
  double ends_at_s = 0;  // timed: the scheduled end of the work before it
};

struct Entry {
  Task task;
  MarkerPtr wait, record;
  double seconds = 0;  // timed: duration of the task
  Link link = Link::none;
  double queued_at_s = 0;
};

struct Queue {
  int device = 0;
  int64_t id = 0;
  double eagerness = 0;  // probability that its next entry runs when other work is queued
  std::deque<Entry> entries;
  double free_at_s = 0;  // timed: the scheduled end of the work that has run
  bool has_thread = false;
};

struct Device {
  char* guarded = nullptr;  // addresses in tensors, without access
  char* kernel = nullptr;   // the same memory, for kernels
  int file = -1;            // its memory
  std::vector<std::unique_ptr<Queue>> queues;
};

constexpr size_t kSpace = size_t{1} << 36;  // addresses of a device

extern std::recursive_mutex mutex;  // of all queues
extern Settings settings;
extern std::exception_ptr failure;
extern Device devices[kDevices];

// Return a device, made at its first use, and a queue of it. The caller holds the mutex.
Device& device(int index);
Queue& queue(int index, int64_t stream);

// Run some queued work, as the schedule draws; all of a device; raise the error of work that has run.
void progress();
void run_everything(Device& device);
void raise_failure();

// Return memory without allocated blocks to the system; all work must have run.
void release_segments(Device& device);

// Mark a marker as passed, now.
void pass(Marker& marker);

// Append an entry; in timed mode, to be run by the queue's thread. The caller holds the mutex once.
void push(Queue& queue, Entry entry);

// Block until a marker has passed, or until nothing of a device is queued, in timed mode.
void await(const MarkerPtr& marker);
void await_all(const std::deque<Queue*>& queues);

// Block until the threads of queues have ended: `settings.timed()` is false and nothing is queued.
void await_threads(const std::deque<Queue*>& queues);

}  // namespace strict
