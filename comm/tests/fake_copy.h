// Copies of fake_ibverbs.cc between host memory. A NIC copies by DMA at the rate of its line, which
// one core does not reach. So where a rate is emulated, idle cores help.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace fake_copy {

class Pool {
 public:
  explicit Pool(unsigned threads) {
    for (unsigned i = 0; i < threads; ++i) std::thread([this] { help(); }).detach();
  }

  // Any number of threads may copy at a time. Returns when all bytes are there.
  void copy(void* to, const void* from, std::size_t n) {
    Job job{static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), n};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(&job);
      version_.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_all();
    work(job);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    }
    while (job.helpers.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  }

 private:
  static constexpr std::size_t kSlice = 32 << 10;

  struct Job {
    uint8_t* to;
    const uint8_t* from;
    std::size_t bytes;
    std::atomic<std::size_t> next{0};
    std::atomic<int> helpers{0};  // counted up under mutex_, while the job is listed
  };

  static void work(Job& job) {
    while (true) {
      const std::size_t at = job.next.fetch_add(kSlice, std::memory_order_relaxed);
      if (at >= job.bytes) return;
      std::memcpy(job.to + at, job.from + at, std::min(kSlice, job.bytes - at));
    }
  }

  // The unfinished job with the fewest helpers, or null. Under mutex_.
  Job* choose() const {
    Job* best = nullptr;
    for (Job* const job : jobs_)
      if (job->next.load(std::memory_order_relaxed) < job->bytes &&
          (best == nullptr || job->helpers.load() < best->helpers.load()))
        best = job;
    return best;
  }

  // Looks for work for a while without sleeping: waking a thread takes as long as a copy.
  void help() {
    using Clock = std::chrono::steady_clock;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (Job* const job = choose()) {
        job->helpers.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        work(*job);
        job->helpers.fetch_sub(1, std::memory_order_release);
        lock.lock();
        continue;
      }
      const uint64_t seen = version_.load(std::memory_order_relaxed);
      lock.unlock();
      const auto end = Clock::now() + std::chrono::milliseconds(1);
      while (version_.load(std::memory_order_acquire) == seen && Clock::now() < end) {
      }
      lock.lock();
      changed_.wait(lock, [this, seen] { return version_.load() != seen; });
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Job*> jobs_;
  std::atomic<uint64_t> version_{0};  // jobs, ever
};

// `helped`: whether other cores help, where there are some to spare.
inline void copy(void* to, const void* from, std::size_t n, bool helped) {
  constexpr unsigned kSpare = 8;
  constexpr unsigned kMost = 6;
  static const unsigned cores = std::thread::hardware_concurrency();
  if (!helped || cores <= kSpare) {
    std::memcpy(to, from, n);
    return;
  }
  // Never destroyed: its threads run until the process ends.
  static Pool& pool = *new Pool(std::min(cores - kSpare, kMost));
  pool.copy(to, from, n);
}

}  // namespace fake_copy
