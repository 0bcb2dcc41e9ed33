// Copies of fake_ibverbs.cc between host memory. A NIC copies by DMA at the rate of its line, which
// one core does not reach. So where a rate is emulated, idle cores help.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>

namespace fake_copy {

// Threads that copy together. One copy at a time. Never destroyed: its threads run until the
// process ends.
class Team {
 public:
  Team() {
    for (Part& part : parts_) std::thread([this, &part] { help(part); }).detach();
  }

  // Returns false if the team is busy, else when all bytes are there.
  bool copy(uint8_t* to, const uint8_t* from, std::size_t n) {
    const std::unique_lock<std::mutex> lock(copying_, std::try_to_lock);
    if (!lock) return false;
    const std::size_t each = n / (parts_.size() + 1) / kPage * kPage;
    std::size_t at = 0;
    for (Part& part : parts_) {
      part.to = to + at;
      part.from = from + at;
      part.bytes = each;
      part.asked.fetch_add(1);
      at += each;
    }
    if (asleep_.load() != 0) {
      const std::lock_guard<std::mutex> waking(sleeping_);
      wake_.notify_all();
    }
    std::memcpy(to + at, from + at, n - at);
    for (const Part& part : parts_)
      while (part.done.load(std::memory_order_acquire) !=
             part.asked.load(std::memory_order_relaxed)) {
      }
    return true;
  }

 private:
  static constexpr std::size_t kHelpers = 3;
  static constexpr std::size_t kPage = 4096;
  struct alignas(64) Part {
    std::atomic<uint32_t> asked{0};
    std::atomic<uint32_t> done{0};
    uint8_t* to = nullptr;
    const uint8_t* from = nullptr;
    std::size_t bytes = 0;
  };

  // Looks for work for a while without sleeping: waking a thread takes as long as a copy.
  void help(Part& part) {
    using Clock = std::chrono::steady_clock;
    for (uint32_t seen = 0;; ++seen) {
      const auto end = Clock::now() + std::chrono::milliseconds(1);
      while (part.asked.load(std::memory_order_acquire) == seen && Clock::now() < end) {
      }
      if (part.asked.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(sleeping_);
        asleep_.fetch_add(1);
        wake_.wait(lock, [&part, seen] { return part.asked.load() != seen; });
        asleep_.fetch_sub(1);
      }
      std::memcpy(part.to, part.from, part.bytes);
      part.done.store(seen + 1, std::memory_order_release);
    }
  }

  std::array<Part, kHelpers> parts_;
  std::mutex copying_;
  std::mutex sleeping_;
  std::condition_variable wake_;
  std::atomic<int> asleep_{0};
};

// `helped`: whether other cores help, where there are some to spare.
inline void copy(void* to, const void* from, std::size_t n, bool helped) {
  constexpr unsigned kSpare = 8;
  static const bool few = std::thread::hardware_concurrency() <= kSpare;
  auto* const target = static_cast<uint8_t*>(to);
  const auto* const source = static_cast<const uint8_t*>(from);
  if (helped && !few) {
    // Two NICs may copy at a time.
    static Team* const teams = new Team[2];
    if (teams[0].copy(target, source, n) || teams[1].copy(target, source, n)) return;
  }
  std::memcpy(to, from, n);
}

}  // namespace fake_copy
