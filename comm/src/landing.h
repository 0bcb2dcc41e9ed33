// Landing: the way of received bytes from host memory into a device, in chunks.
#pragma once

#include <array>
#include <memory>

#include "afd_comm/accelerator.h"
#include "stage.h"

namespace afd_comm {

// Waits until the copies before the event are done. Throws CommError if the device does not do them
// in 10 s.
void wait_copied(Accelerator& accelerator, Event event);

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
  // Waits until everything is on the device. Throws CommError if the device does not copy it in
  // 10 s.
  void finish();

 private:
  static constexpr std::size_t kWindow = 8;
  void wait(Event event);

  std::shared_ptr<Accelerator> accelerator_;
  StageBuffer buffer_;
  Stream stream_;
  std::array<Event, kWindow> copied_{};
  std::size_t now_ = 0;    // chunk that is being filled
  uint64_t filled_ = 0;    // bytes of it
  uint8_t* to_ = nullptr;  // their place
  bool dirty_ = false;     // copies were issued since finish()
};

}  // namespace afd_comm
