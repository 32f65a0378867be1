#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace patrickstar {
#if defined(__x86_64__)
DefaultArithmetic::DefaultArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
DefaultArithmetic::~DefaultArithmetic() { _mm_setcsr(static_cast<unsigned>(before_)); }
#elif defined(__aarch64__)
DefaultArithmetic::DefaultArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
}
DefaultArithmetic::~DefaultArithmetic() { asm volatile("msr fpcr, %0" ::"r"(before_)); }
#else
DefaultArithmetic::DefaultArithmetic() : before_(0) {}
DefaultArithmetic::~DefaultArithmetic() {}
#endif

// [Note: waits of the pool]
// A short update takes as long as waking a thread: 2^16 elements 30 µs. So a thread without work looks for some during
// `SPIN` before it sleeps, and so does a thread that waits for the last pieces of a job. That is as long as a wake-up
// takes, which therefore costs at most twice what the better of both choices would. The thread that finishes a job runs
// pieces of it itself, in place of a thread that would have to wake.
constexpr std::chrono::microseconds SPIN{50};

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Returns true as soon as `condition` holds, and false if it does not within `SPIN`.
template <class Condition>
bool spin_until(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; i++) {
            if (condition()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return condition();
}

class Pool;

class Job {
  public:
    Job(int64_t pieces, int threads, std::function<void(int64_t)> work)
        : pieces(pieces), threads(threads), work(std::move(work)) {}

    const int64_t pieces;
    const int threads;
    const std::function<void(int64_t)> work;
    Pool* pool = nullptr;  // null if the caller did all the work
    int running = 0;       // threads that run its pieces; guarded by the pool's mutex
    std::atomic<int64_t> done{0};
    std::condition_variable all_done;

    bool is_done() const { return done.load(std::memory_order_acquire) == pieces; }

    bool has_pieces() const { return next_.load(std::memory_order_relaxed) < pieces; }

    // Runs pieces until all have begun. Returns true if the last one of all ended here.
    bool run() {
        const DefaultArithmetic guard;
        int64_t count = 0;
        for (int64_t piece = 0; const int64_t length = take(piece); count += length)
            for (const int64_t end = piece + length; piece < end; piece++) work(piece);
        return count > 0 && done.fetch_add(count, std::memory_order_acq_rel) + count == pieces;
    }

  private:
    // Takes the next pieces, in `first` and behind it, and returns their number: three quarters of an equal share of
    // what is left. A thread runs neighbours, which it prefetches, and begins anew few times; the rest lets threads that
    // begin late end at the same time as the others.
    int64_t take(int64_t& first) {
        first = next_.load(std::memory_order_relaxed);
        int64_t length;
        do {
            if (first >= pieces) return 0;
            length = std::max<int64_t>(1, (pieces - first) * 3 / (4 * threads));
        } while (!next_.compare_exchange_weak(first, first + length, std::memory_order_relaxed));
        return length;
    }

    std::atomic<int64_t> next_{0};
};

class Pool {
  public:
    // Returns false if the pool has no thread. `helpers`: threads of the caller's that will run pieces.
    bool add(const std::shared_ptr<Job>& job, int helpers) {
        int wanted;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            grow(job->threads);
            if (size_ == 0) return false;
            job->pool = this;
            jobs_.push_back(job);
            added_.fetch_add(1, std::memory_order_release);
            wanted = static_cast<int>(std::min<int64_t>(job->threads, job->pieces)) - helpers - spinning_;
        }
        for (; wanted > 0; wanted--) wake_.notify_one();
        return true;
    }

    // Runs pieces of the job, as one of its threads, and waits for the others.
    void finish(const std::shared_ptr<Job>& job) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (may_run(*job)) run(job, lock);
        lock.unlock();
        if (spin_until([&] { return job->is_done(); })) return;
        lock.lock();
        job->all_done.wait(lock, [&] { return job->is_done(); });
    }

    int size() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return size_;
    }

  private:
    void grow(int threads) {
        try {
            for (; size_ < threads; size_++) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            // The system can create no more threads: continue with the existing ones.
        }
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            std::shared_ptr<Job> job;
            const auto found = [&] { return (job = first_open()) != nullptr; };
            while (!found()) {
                const uint64_t seen = added_.load(std::memory_order_relaxed);
                spinning_++;
                lock.unlock();
                const bool more = spin_until([&] { return added_.load(std::memory_order_acquire) != seen; });
                lock.lock();
                spinning_--;
                if (more) continue;
                wake_.wait(lock, found);
                break;
            }
            run(job, lock);
        }
    }

    // Runs pieces of a job until all have begun. The lock is held before and afterwards.
    void run(const std::shared_ptr<Job>& job, std::unique_lock<std::mutex>& lock) {
        job->running++;
        running_++;
        lock.unlock();
        const bool last = job->run();
        lock.lock();
        if (last) job->all_done.notify_all();
        running_--;
        job->running--;
        const auto listed = std::find(jobs_.begin(), jobs_.end(), job);
        if (listed != jobs_.end()) jobs_.erase(listed);
        // A thread that found all places taken may be asleep, and this one may not come back: it may be the caller's.
        if (!jobs_.empty()) wake_.notify_one();
    }

    bool may_run(const Job& job) const {
        int limit = 0;
        for (const auto& each : jobs_) limit = std::max(limit, each->threads);
        return job.has_pieces() && job.running < job.threads && running_ < limit;
    }

    std::shared_ptr<Job> first_open() const {
        const auto first = std::find_if(jobs_.begin(), jobs_.end(), [&](const auto& job) { return may_run(*job); });
        return first == jobs_.end() ? nullptr : *first;
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Job>> jobs_;  // jobs with pieces that no thread has started yet, and some without
    std::atomic<uint64_t> added_{0};         // number of jobs so far
    int size_ = 0;
    int running_ = 0;
    int spinning_ = 0;
};

namespace {

// Never destroyed, because its threads live as long as the process. A forked child has no threads and gets a new pool.
Pool* pool_of_process = nullptr;

void replace_pool() { pool_of_process = new Pool; }

Pool& pool() {
    static const bool once = [] {
        replace_pool();
        pthread_atfork(nullptr, nullptr, replace_pool);
        return true;
    }();
    (void)once;
    return *pool_of_process;
}

}  // namespace

std::shared_ptr<Job> start(int64_t pieces, int threads, std::function<void(int64_t)> work) {
    auto job = std::make_shared<Job>(pieces, std::max(1, threads), std::move(work));
    if (pieces == 0 || !pool().add(job, 0)) job->run();
    return job;
}

void finish(const std::shared_ptr<Job>& job) {
    if (job->pool == &pool()) pool().finish(job);
}

void run(int64_t pieces, int threads, std::function<void(int64_t)> work) {
    const auto job = std::make_shared<Job>(pieces, std::max(1, threads), std::move(work));
    // Running a single piece here is faster than handing it to another thread.
    if (pieces <= 1 || !pool().add(job, 1))
        job->run();
    else
        pool().finish(job);
}

int pool_size() { return pool().size(); }

}  // namespace patrickstar
