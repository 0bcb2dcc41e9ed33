// A futex that threads sleep on until something changes. A change costs nothing while no thread
// sleeps.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace afd_comm {

class EventCount {
 public:
  void notify() {
    // Sequentially consistent on both sides: either the waiter sees the new count, or we see it.
    count_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0)
      syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Between construction and sleep() the caller checks once more whether it has to wait.
  class Waiter {
   public:
    explicit Waiter(EventCount& events) : events_(events) {
      events_.sleepers_.fetch_add(1, std::memory_order_seq_cst);
      seen_ = events_.count_.load(std::memory_order_seq_cst);
    }
    ~Waiter() { events_.sleepers_.fetch_sub(1, std::memory_order_relaxed); }
    Waiter(const Waiter&) = delete;
    void sleep(uint64_t timeout_ns) const {
      const timespec timeout{static_cast<time_t>(timeout_ns / 1000000000u),
                             static_cast<long>(timeout_ns % 1000000000u)};
      syscall(SYS_futex, &events_.count_, FUTEX_WAIT_PRIVATE, seen_, &timeout, nullptr, 0);
    }

   private:
    EventCount& events_;
    uint32_t seen_;
  };

 private:
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace afd_comm
