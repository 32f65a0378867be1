// Timed mode of the strict device: each stream has a thread that runs its work in order, and sleeps until its end.
#include <chrono>
#include <condition_variable>
#include <thread>
#include <utility>

#include "queues.h"

namespace strict {
namespace {

using Clock = std::chrono::steady_clock;

// Never destroyed: threads may wait for it when the process exits.
std::condition_variable_any& changed = *new std::condition_variable_any;
double link_free_at_s[] = {0, 0, 0};
thread_local double charged_s = 0;

double now_s() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

void sleep_until(double end_s) {
  auto since = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(end_s));
  std::this_thread::sleep_until(Clock::time_point(since));
}

// Run the first entry of a queue. Its scheduled end follows from the scheduled end of what comes before it, not from
// the time at which a thread woke up, so that delays do not add up.
void run_timed(Queue& queue, std::unique_lock<std::recursive_mutex>& lock) {
  Entry& front = queue.entries.front();  // stays in place while others are appended
  if (front.wait) {
    changed.wait(lock, [&] { return front.wait->passed; });
    queue.free_at_s = std::max(queue.free_at_s, front.wait->ends_at_s);
  }
  if (front.task) {
    double& link_s = link_free_at_s[static_cast<int>(front.link)];
    double begin_s = std::max(queue.free_at_s, front.queued_at_s);
    if (front.link != Link::none) begin_s = std::max(begin_s, link_s);
    queue.free_at_s = link_s = begin_s + front.seconds;
    Task task = std::move(front.task);
    lock.unlock();
    std::exception_ptr error;
    try {
      task();
      task = nullptr;
    } catch (...) {
      error = std::current_exception();
    }
    sleep_until(queue.free_at_s);
    lock.lock();
    if (error && !failure) failure = error;
  }
  if (front.record) {
    front.record->ends_at_s = queue.free_at_s;
    pass(*front.record);
    front.record->passed_at_s = std::max(queue.free_at_s, front.queued_at_s);  // as scheduled, whenever a thread woke up
  }
  queue.entries.pop_front();
  changed.notify_all();
}

void run_thread(Queue& queue) {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] { return !settings.timed() || !queue.entries.empty(); });
    if (!settings.timed()) break;
    run_timed(queue, lock);
  }
  queue.has_thread = false;
  changed.notify_all();
}

}  // namespace

void push(Queue& queue, Entry entry) {
  if (settings.timed()) {
    entry.queued_at_s = now_s();
    if (!std::exchange(queue.has_thread, true)) std::thread(run_thread, std::ref(queue)).detach();
  }
  queue.entries.push_back(std::move(entry));
  if (settings.timed()) changed.notify_all();
}

void await(const MarkerPtr& marker) {
  changed.wait(mutex, [&] { return marker->passed; });
}

void await_all(const std::deque<Queue*>& queues) {
  changed.wait(mutex, [&] {
    for (Queue* each : queues) {
      if (!each->entries.empty()) return false;
    }
    return true;
  });
}

void await_threads(const std::deque<Queue*>& queues) {
  changed.notify_all();
  changed.wait(mutex, [&] {
    for (Queue* each : queues) {
      if (each->has_thread) return false;
    }
    return true;
  });
}

double charge(double seconds) { return std::exchange(charged_s, seconds); }

}  // namespace strict
