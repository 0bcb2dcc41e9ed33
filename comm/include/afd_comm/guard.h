// Guard: releases a stream whose peer never rings, so that a hung or dead peer costs one deadline,
// not the process.
//
// A stream that waits for a doorbell cannot be interrupted. But the doorbell is in host memory, so
// the guard writes the flag that the stream waits for. The caller must discard what the stream
// computes after that; a Hold keeps later work of the stream from using it. The flags involved must
// not be used again, since the late message may still arrive.
#pragma once

#include <memory>
#include <vector>

#include "afd_comm/accelerator.h"
#include "afd_comm/claims.h"
#include "afd_comm/hold.h"
#include "afd_comm/region.h"

namespace afd_comm {

class Guard {
 public:
  // Watches the work that `stream` has been given so far. `awaited`: the (slot, flag) pairs of its
  // waits, in order; statuses are ignored. With a hold, that work is a step of it, and later work
  // of the stream waits until the hold is open. Region and hold must outlive this.
  Guard(Region& region, Stream stream, std::vector<Awaited> awaited, Hold* hold = nullptr);
  ~Guard();
  Guard(const Guard&) = delete;

  bool done() const;
  // Waits until the stream has finished. Releases the slots of a writer that is gone at once, and
  // all slots at `deadline`; it does not find out which peer was late. Afterwards the entries of
  // `awaited()` are Ok, PeerGone or Deadline. Returns true if `interrupt` ended the wait. Throws
  // CommError if the stream stays busy after all its waits were released. Unless all are Ok, the
  // hold is closed: the caller opens it.
  bool wait(uint64_t deadline, Interrupt interrupt);
  const std::vector<Awaited>& awaited() const { return awaited_; }

 private:
  // A slot of the stream's waits.
  struct Due {
    uint32_t slot;
    std::vector<uint64_t> flags;  // each once, in the order of its first wait
    std::size_t next = 0;
    Status status = Status::Ok;
  };
  bool withhold();
  void release(Due& due, Status status);
  void ring_released();
  void finish();

  Region& region_;
  std::vector<Awaited> awaited_;
  std::vector<Due> due_;
  Hold* hold_;
  uint64_t step_ = 0;  // of the hold
  bool withheld_ = false;
  Event event_;
};

}  // namespace afd_comm
