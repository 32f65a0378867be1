// One pool of threads for the process, whoever asks: two engines share it, so they never run more threads than one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace patrickstar {

class Job;

// Starts `work(0) ... work(pages - 1)`, in any order, on up to `threads` threads of the pool.
std::shared_ptr<Job> start(int64_t pages, int threads, std::function<void(int64_t)> work);

// Sleeps until all pages of the job are done.
void finish(Job& job);

// How many threads the pool has started.
int pool_size();

}  // namespace patrickstar
