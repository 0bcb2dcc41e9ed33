#include "afd_comm/claims.h"

#include <sys/file.h>

#include <algorithm>
#include <cerrno>

namespace afd_comm {
namespace {

// A file lock, because the kernel releases it when its holder dies. A lock in the shared memory
// would stay taken.
class FileLock {
 public:
  FileLock(int fd, uint64_t deadline) : fd_(fd) {
    while (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      const int error = errno;
      if (error != EWOULDBLOCK && error != EINTR)
        throw CommError("cannot lock the region to claim slots: " + errno_text(error));
      if (now_ns() >= deadline)
        throw CommError(
            "another process holds the region's claim lock (is it stopped?); resume or kill it");
      nap(200000);
    }
  }
  FileLock(const FileLock&) = delete;
  ~FileLock() { flock(fd_, LOCK_UN); }

 private:
  int fd_;
};

}  // namespace

uint64_t take_claim(const Memory& memory, SlotRange range, ProcessIdentity owner, int lock_fd,
                    uint64_t deadline) {
  if (range.count == 0) return 0;
  if (uint64_t{range.first} + range.count > memory.geometry().slots)
    throw CommError("slots " + std::to_string(range.first) + " to " +
                    std::to_string(uint64_t{range.first} + range.count - 1) +
                    " exceed the region, which has " + std::to_string(memory.geometry().slots) +
                    " slots; both sides must use the same topology");
  const FileLock lock(lock_fd, deadline);
  const uint64_t serial = memory.head().serials.fetch_add(1, std::memory_order_relaxed) + 1;
  for (uint32_t slot = range.first; slot - range.first < range.count; ++slot) {
    Claim& claim = memory.claim(slot);
    // Owner first: a reader that sees the new serial must not pair it with the old, dead owner.
    claim.owner.store(owner, std::memory_order_relaxed);
    claim.serial.store(serial, std::memory_order_release);
  }
  return serial;
}

void end_claim(const Memory& memory, SlotRange range, uint64_t serial) {
  bool any = false;
  for (uint32_t slot = range.first; slot - range.first < range.count; ++slot) {
    uint64_t expected = serial;
    any |= memory.claim(slot).serial.compare_exchange_strong(expected, serial | kSerialGone);
  }
  if (any) memory.nudge();
}

bool WriterWatch::look(const Memory& memory, uint32_t slot) {
  Claim& claim = memory.claim(slot);
  const uint64_t serial = claim.serial.load(std::memory_order_acquire);
  if (serial & kSerialGone) return true;
  const ProcessIdentity owner = claim.owner.load(std::memory_order_relaxed);
  if (serial == 0 || owner == 0 || alive(owner)) return false;
  // Fails if a new writer took the slot meanwhile; then this one is not gone.
  uint64_t expected = serial;
  return claim.serial.compare_exchange_strong(expected, serial | kSerialGone);
}

bool WriterWatch::alive(ProcessIdentity owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = std::find_if(watches_.begin(), watches_.end(),
                                  [owner](const ProcessWatch& w) { return w.identity() == owner; });
  if (known == watches_.end()) {
    // No later call looks at an ended writer whose slots have a new writer.
    watches_.erase(std::remove_if(watches_.begin(), watches_.end(),
                                  [](const ProcessWatch& w) { return !w.alive(); }),
                   watches_.end());
    watches_.emplace_back(owner);
    if (watches_.back().alive()) return true;
    watches_.pop_back();
    return false;
  }
  if (known->alive()) return true;
  watches_.erase(known);
  return false;
}

}  // namespace afd_comm
