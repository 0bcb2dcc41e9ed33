// StageBuffer: host memory that messages of a device are copied through.
#pragma once

#include <memory>

#include "afd_comm/accelerator.h"

namespace afd_comm {

// Bytes of a copy between a device and the host, and of a stripe of a message that is copied. Small
// enough that the first bytes leave early, large enough that a copy takes longer than its call.
constexpr uint64_t kStageChunk = 256 << 10;

// Host memory that a device's copy engine can reach.
class StageBuffer {
 public:
  // Throws CommError.
  StageBuffer(std::shared_ptr<Accelerator> accelerator, uint64_t nbytes);
  ~StageBuffer();
  StageBuffer(const StageBuffer&) = delete;
  uint8_t* host() const { return host_; }
  void* for_device(const uint8_t* at) const { return pinned_->at(at); }
  uint64_t nbytes() const { return nbytes_; }

 private:
  uint8_t* host_;
  uint64_t nbytes_;
  std::unique_ptr<Pinned> pinned_;
};

}  // namespace afd_comm
