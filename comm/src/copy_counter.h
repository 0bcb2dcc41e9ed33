// CopyCounter: how far the copies of a stream have come, by events. On ROCm a write by the stream,
// which the CPU could read without a call, would be a kernel.
#pragma once

#include <memory>
#include <vector>

#include "afd_comm/accelerator.h"

namespace afd_comm {

// For one thread at a time. Calls throw CommError if the device fails.
class CopyCounter {
 public:
  // `window`: how many counts may be on their way.
  CopyCounter(std::shared_ptr<Accelerator> accelerator, std::size_t window);
  ~CopyCounter();
  CopyCounter(const CopyCounter&) = delete;

  // Counts one more behind the stream's earlier work. Returns the count then. Use one stream, and
  // ask for no count behind which there are `window` others.
  uint64_t enqueue(Stream stream);
  // Whether the stream has come that far.
  bool reached(uint64_t count);
  // Returns when it has. Throws CommError if it has not in 10 s.
  void wait(uint64_t count);
  // The last count.
  uint64_t enqueued() const { return enqueued_; }

 private:
  std::shared_ptr<Accelerator> accelerator_;
  std::vector<Event> events_;
  uint64_t enqueued_ = 0;
  uint64_t reached_ = 0;
};

}  // namespace afd_comm
