// CopyCounter: how far the copies of a stream have come. On CUDA the stream writes the count into
// host memory behind each copy: threads that ask the driver wait for each other. On ROCm that write
// would be a kernel, so the driver is asked for events.
#pragma once

#include <memory>
#include <vector>

#include "afd_comm/accelerator.h"
#include "stage_buffer.h"

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
  std::unique_ptr<StageBuffer> word_;  // CUDA: begins with the count
  std::vector<Event> events_;          // others
  uint64_t enqueued_ = 0;
  uint64_t reached_ = 0;
};

}  // namespace afd_comm
