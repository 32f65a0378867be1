#include "pool.h"

#include <pthread.h>

#include <algorithm>
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

class Pool;

class Job {
  public:
    Job(int64_t pages, int threads, std::function<void(int64_t)> work)
        : pages(pages), threads(threads), work(std::move(work)) {}

    const int64_t pages;
    const int threads;
    const std::function<void(int64_t)> work;
    Pool* pool = nullptr;  // null if the caller did all the work
    int64_t next = 0;
    int64_t done = 0;
    int running = 0;
    std::condition_variable all_done;

    void run(int64_t page) const {
        const DefaultArithmetic guard;
        work(page);
    }
};

class Pool {
  public:
    // Returns false if the pool has no thread.
    bool add(const std::shared_ptr<Job>& job) {
        const std::lock_guard<std::mutex> lock(mutex_);
        grow(job->threads);
        if (size_ == 0) return false;
        job->pool = this;
        jobs_.push_back(job);
        wake_.notify_all();
        return true;
    }

    void wait(Job& job) {
        std::unique_lock<std::mutex> lock(mutex_);
        job.all_done.wait(lock, [&] { return job.done == job.pages; });
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
            // Threads look for another job before they sleep, so only a new job needs to wake them.
            wake_.wait(lock, [&] { return (job = first_open()) != nullptr; });
            job->running++;
            running_++;
            while (job->next < job->pages) {
                const int64_t page = job->next++;
                if (job->next == job->pages) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
                lock.unlock();
                job->run(page);
                lock.lock();
                if (++job->done == job->pages) job->all_done.notify_all();
            }
            running_--;
            job->running--;
        }
    }

    std::shared_ptr<Job> first_open() {
        int limit = 0;
        for (const auto& job : jobs_) limit = std::max(limit, job->threads);
        if (running_ >= limit) return nullptr;
        const auto open = [](const auto& job) { return job->running < job->threads; };
        const auto first = std::find_if(jobs_.begin(), jobs_.end(), open);
        return first == jobs_.end() ? nullptr : *first;
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Job>> jobs_;  // jobs with pages that no thread has started yet
    int size_ = 0;
    int running_ = 0;
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

std::shared_ptr<Job> start(int64_t pages, int threads, std::function<void(int64_t)> work) {
    auto job = std::make_shared<Job>(pages, std::max(1, threads), std::move(work));
    // Running a single page here is faster than handing it to another thread.
    if (pages <= 1 || !pool().add(job)) {
        for (int64_t page = 0; page < pages; page++) job->run(page);
        job->done = pages;
    }
    return job;
}

void finish(Job& job) {
    if (job.pool == &pool()) pool().wait(job);
}

int pool_size() { return pool().size(); }

}  // namespace patrickstar
