#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace patrickstar {
namespace {

// Threads inherit rounding and flush-to-zero from whoever starts them, and a user may have changed either
// (`torch.set_flush_denormal`). Results must not depend on it.
class DefaultArithmetic {
#if defined(__x86_64__)
    static constexpr unsigned DEFAULT = 0x1f80;
    const unsigned before_ = _mm_getcsr();

  public:
    DefaultArithmetic() { _mm_setcsr(DEFAULT); }
    ~DefaultArithmetic() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
    uint64_t before_;

  public:
    DefaultArithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
    }
    ~DefaultArithmetic() { asm volatile("msr fpcr, %0" ::"r"(before_)); }
#endif
};

}  // namespace

class Job {
  public:
    Job(int64_t pages, int threads, std::function<void(int64_t)> work)
        : pages(pages), threads(threads), work(std::move(work)) {}

    const int64_t pages;
    const int threads;
    const std::function<void(int64_t)> work;
    int64_t next = 0;
    int64_t done = 0;
    int running = 0;
    std::condition_variable all_done;

    bool open() const { return next < pages && running < threads; }
};

namespace {

class Pool {
  public:
    void add(const std::shared_ptr<Job>& job) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (; size_ < job->threads; size_++) std::thread([this] { serve(); }).detach();
        jobs_.push_back(job);
        wake_.notify_all();
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
    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            std::shared_ptr<Job> job;
            wake_.wait(lock, [&] { return (job = first_open()) != nullptr; });
            job->running++;
            while (job->next < job->pages) {
                const int64_t page = job->next++;
                if (job->next == job->pages) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
                lock.unlock();
                {
                    const DefaultArithmetic guard;
                    job->work(page);
                }
                lock.lock();
                if (++job->done == job->pages) job->all_done.notify_all();
            }
            job->running--;
        }
    }

    std::shared_ptr<Job> first_open() {
        const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->open(); });
        return found == jobs_.end() ? nullptr : *found;
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Job>> jobs_;
    int size_ = 0;
};

// Never destroyed: its threads live as long as the process. After a fork the child has none of them, and a new pool.
Pool* pool_of_process = nullptr;

void forget_pool() { pool_of_process = new Pool; }

Pool& pool() {
    static const bool once = [] {
        forget_pool();
        pthread_atfork(nullptr, nullptr, forget_pool);
        return true;
    }();
    (void)once;
    return *pool_of_process;
}

}  // namespace

std::shared_ptr<Job> start(int64_t pages, int threads, std::function<void(int64_t)> work) {
    auto job = std::make_shared<Job>(pages, std::max(1, threads), std::move(work));
    if (pages == 1) {  // sooner done than handed over
        const DefaultArithmetic guard;
        job->work(0);
        job->done = 1;
    } else if (pages > 1) {
        pool().add(job);
    }
    return job;
}

void finish(Job& job) { pool().wait(job); }

int pool_size() { return pool().size(); }

}  // namespace patrickstar
