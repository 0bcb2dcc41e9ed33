// DeviceCounter: a page-locked word that tells the CPU how far a stream has come. Reading it is not
// a call of the driver, whose locks all threads of a process share.
#pragma once

#include <atomic>
#include <memory>

#include "stage_buffer.h"

namespace afd_comm {

class DeviceCounter {
 public:
  // Throws CommError.
  explicit DeviceCounter(std::shared_ptr<Accelerator> accelerator);
  DeviceCounter(const DeviceCounter&) = delete;

  // Has the stream count one more after its earlier work. Returns the count then. Use one stream.
  // Throws CommError.
  uint64_t enqueue(Stream stream);
  // Whether the stream has counted that far.
  bool reached(uint64_t count) const { return word().load(std::memory_order_acquire) >= count; }
  // Throws CommError if the stream does not count that far in 10 s.
  void wait(uint64_t count) const;
  // All that was enqueued.
  uint64_t enqueued() const { return enqueued_; }

 private:
  const std::atomic<uint64_t>& word() const {
    return *reinterpret_cast<const std::atomic<uint64_t>*>(buffer_.host());
  }

  std::shared_ptr<Accelerator> accelerator_;
  StageBuffer buffer_;
  uint64_t enqueued_ = 0;
};

}  // namespace afd_comm
