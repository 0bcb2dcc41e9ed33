// Hold: stops a stream behind a step in which a peer died, so that nothing uses what it computed.
//
// Behind each step the stream writes the step's number, then waits while the hold is closed. In a
// good step nobody closes it, and the host takes no part. A guard closes it before it rings in
// place of a peer. The number tells whether the stream was still in the step.
#pragma once

#include <cstdint>
#include <memory>

#include "afd_comm/accelerator.h"

namespace afd_comm {

class Hold {
 public:
  explicit Hold(Device device);
  ~Hold();
  Hold(const Hold&) = delete;

  // Ends a step: work that the stream gets later runs while the hold is open. Returns the number of
  // the step.
  uint64_t enqueue(Stream stream);
  // Closes the hold for the last step. Returns false if the stream has left the step; the hold is
  // open then.
  bool close(uint64_t step);
  void open();
  bool closed() const;

 private:
  struct Words;
  std::shared_ptr<Accelerator> accelerator_;
  std::unique_ptr<Words> words_;
  Pinned pinned_;
  uint64_t steps_ = 0;
};

}  // namespace afd_comm
