// A queue of fixed size for any number of writers and readers, none of which waits for another.
// Follows D. Vyukov's bounded MPMC queue: a cell's turn says who may use it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace afd_comm {

template <typename Value, std::size_t kSize>
class BoundedQueue {
  static_assert((kSize & (kSize - 1)) == 0, "a power of two");

 public:
  BoundedQueue() {
    for (std::size_t i = 0; i < kSize; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
  }

  // Returns false if the queue is full, or the cell is still being read.
  bool push(const Value& value) {
    return take_cell(tail_, 0, [&](Cell& cell) { cell.value = value; }, 1);
  }
  // Returns false if the queue is empty, or the cell is still being written.
  bool pop(Value& value) {
    return take_cell(head_, 1, [&](Cell& cell) { value = cell.value; }, kSize);
  }
  // A hint that lets a caller skip a pop() that would return nothing.
  bool empty() const {
    return head_.load(std::memory_order_relaxed) == tail_.load(std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Cell {
    std::atomic<uint64_t> turn;  // position: free for it; position + 1: holds its value
    Value value;
  };

  // `ready`: how far the turn is ahead of the position when the cell is ours. `next`: how far it is
  // ahead when we are done.
  template <typename Use>
  bool take_cell(std::atomic<uint64_t>& end, uint64_t ready, Use use, uint64_t next) {
    uint64_t position = end.load(std::memory_order_relaxed);
    while (true) {
      Cell& cell = cells_[position % kSize];
      const auto behind =
          static_cast<int64_t>(cell.turn.load(std::memory_order_acquire) - (position + ready));
      if (behind < 0) return false;
      if (behind > 0) {
        position = end.load(std::memory_order_relaxed);
      } else if (end.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
        use(cell);
        cell.turn.store(position + next, std::memory_order_release);
        return true;
      }
    }
  }

  alignas(64) std::atomic<uint64_t> tail_{0};
  alignas(64) std::atomic<uint64_t> head_{0};
  std::array<Cell, kSize> cells_;
};

}  // namespace afd_comm
