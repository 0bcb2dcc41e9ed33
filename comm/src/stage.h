// Stage: copies a message from device memory into page-locked host memory, in chunks, so that its
// first bytes can be sent while the others are still copied.
#pragma once

#include <array>
#include <memory>

#include "afd_comm/types.h"
#include "copy_counter.h"
#include "driven_link.h"
#include "stage_buffer.h"

namespace afd_comm {

// For one thread at a time. Nothing waits or allocates after construction.
class Stage {
 public:
  explicit Stage(std::shared_ptr<Accelerator> accelerator);
  ~Stage();
  Stage(const Stage&) = delete;

  // Starts to copy the parts into the buffer, end to end, and makes `message` refer to the copies.
  // The data must be complete: no stream is waited for. Throws CommError.
  void begin(Message& message, const StageBuffer& buffer);
  // Looks at the copies, and gives the device more of them. Throws CommError.
  void advance();
  // Bytes that are on the host. Other threads may look, too.
  const Available* available() const { return &available_; }
  bool complete() const { return available_.load(std::memory_order_relaxed) == total_; }

 private:
  static constexpr std::size_t kWindow = 8;  // chunks that the device has at a time
  struct Chunk {
    uint64_t count = 0;  // of copied_ when it is on the host
    uint64_t end = 0;
  };
  void issue();

  std::shared_ptr<Accelerator> accelerator_;
  Stream stream_;
  CopyCounter copied_;
  std::array<Chunk, kWindow> ring_;
  std::size_t first_ = 0;  // the oldest chunk on its way
  std::size_t flying_ = 0;
  // What is left to copy: the rest of parts_[part_] and the parts behind it.
  Part parts_[kMaxParts];
  std::size_t part_count_ = 0;
  std::size_t part_ = 0;
  uint64_t in_part_ = 0;
  const StageBuffer* buffer_ = nullptr;
  uint64_t issued_ = 0;
  uint64_t total_ = 0;
  Available available_{0};
};

}  // namespace afd_comm
