// Landing: the way of received bytes from host memory into a device, in chunks.
#pragma once

#include <array>
#include <memory>

#include "copy_counter.h"
#include "stage_buffer.h"

namespace afd_comm {

// For one thread. After construction nothing allocates; calls wait for copies, not for peers.
class Landing {
 public:
  // Throws CommError.
  explicit Landing(std::shared_ptr<Accelerator> accelerator);
  ~Landing();
  Landing(const Landing&) = delete;

  struct Room {
    uint8_t* data;
    uint64_t nbytes;
  };
  // Where the next bytes go. Throws CommError if a copy fails.
  Room room();
  // `n` bytes were put into room(). `to`: their place on the device; those of one chunk must be
  // contiguous there until flush(). Throws CommError.
  void arrived(void* to, uint64_t n);
  // Gives the device what it does not have yet. Throws CommError.
  void flush();
  // Of what the device was given so far: compare with landed().
  uint64_t flushed() const { return copied_.enqueued(); }
  // Whether that much is on the device. Throws CommError.
  bool landed(uint64_t flushed) { return copied_.reached(flushed); }
  // Waits until everything is on the device. Throws CommError if the device does not copy it in
  // 10 s.
  void finish();

 private:
  static constexpr std::size_t kWindow = 8;
  std::shared_ptr<Accelerator> accelerator_;
  StageBuffer buffer_;
  Stream stream_;
  CopyCounter copied_;
  std::array<uint64_t, kWindow> free_at_{};  // count of copied_ at which a chunk is free again
  std::size_t now_ = 0;                      // chunk that is being filled
  uint64_t filled_ = 0;                      // bytes of it
  uint8_t* to_ = nullptr;                    // their place
};

}  // namespace afd_comm
