// Claims record which writer owns each slot, so that a waiter notices the writer's death.
#pragma once

#include <mutex>
#include <vector>

#include "afd_comm/memory.h"

namespace afd_comm {

// How long a receiver waits for the lock of take_claim().
constexpr int64_t kClaimLockUs = 100000;

// Claims `range` for `owner` (0: a connection) and returns the claim's serial, which proves it.
// Older claims end. `lock_fd` must be an open file description of the memory that no other thread
// uses. Throws CommError if the range lies outside of the region, or if the lock is not free by
// `deadline`.
uint64_t take_claim(const Memory& memory, SlotRange range, ProcessIdentity owner, int lock_fd,
                    uint64_t deadline);

// Marks the writer of the range as gone in every slot that still belongs to the serial, and wakes
// waiters.
void end_claim(const Memory& memory, SlotRange range, uint64_t serial);

// Whether the slot still belongs to that serial.
inline bool holds_claim(const Memory& memory, uint32_t slot, uint64_t serial) {
  return memory.claim(slot).serial.load(std::memory_order_acquire) == serial;
}

// The receiver's view of its writers.
class WriterWatch {
 public:
  // Whether the slot's writer is known to be gone. Costs one load.
  static bool gone(const Memory& memory, uint32_t slot) {
    return memory.claim(slot).serial.load(std::memory_order_acquire) & kSerialGone;
  }
  // Like gone(), but also asks the kernel whether the writer is alive. Thread safe.
  bool look(const Memory& memory, uint32_t slot);

 private:
  bool alive(ProcessIdentity owner);
  std::mutex mutex_;
  std::vector<ProcessWatch> watches_;
};

}  // namespace afd_comm
