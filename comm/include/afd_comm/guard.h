// Guard: frees a stream whose peer never comes, so that a wedged or dead peer costs one deadline
// and not the process.
//
// A stream that waits for a doorbell cannot be interrupted, but the doorbell is in host memory: the
// guard writes what the stream waits for. What is computed from then on is garbage for the caller
// to drop, and the flags involved are void: the late message may still come.
#pragma once

#include <memory>
#include <vector>

#include "afd_comm/accelerator.h"
#include "afd_comm/claims.h"
#include "afd_comm/region.h"

namespace afd_comm {

class Guard {
 public:
  // Watches what `stream` was given so far. `awaited`: the (slot, flag) pairs of its waits, in
  // order; statuses are ignored. The region must outlive this.
  Guard(Region& region, Stream stream, std::vector<Awaited> awaited);
  ~Guard();
  Guard(const Guard&) = delete;

  bool done() const;
  // Until the stream is through. Slots whose writer is gone are released at once, at `deadline` all
  // of them: who was late is for the caller to find out. The entries of `awaited()` say Ok,
  // PeerGone or Deadline from then on. Returns true when `interrupt` said so. Throws CommError when
  // the stream is stuck even so.
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
  void release(Due& due, Status status);
  void ring_released();
  void finish();

  Region& region_;
  std::vector<Awaited> awaited_;
  std::vector<Due> due_;
  Event event_;
};

}  // namespace afd_comm
