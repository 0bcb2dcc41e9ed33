// Backend tcp, sender: one connection of a link, and the stripe that it sends.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <vector>

#include "afd_comm/process.h"
#include "driven_link.h"
#include "tcp_wire.h"
#include "zero_copy.h"

namespace afd_comm {

// For one thread at a time.
class TcpOutgoing {
 public:
  // `zero_copy_from`: see LinkOptions.
  TcpOutgoing(Fd fd, uint32_t slots, int64_t zero_copy_from);

  int fd() const { return fd_.get(); }

  // Takes bytes `begin` to `end` of the message's parts, laid end to end. `head`: of the message;
  // its parts are filled in.
  void load(const FrameHead& head, const Message& message, uint64_t begin, uint64_t end);
  enum class Progress {
    Done,
    Full,     // go on when the socket is writable
    Starved,  // go on when more bytes are available
    Failed,
  };
  // Sends what it can. `available`: see DrivenLink::start.
  Progress advance(const Available* available);
  // Whether a stripe is loaded and not done.
  bool busy() const { return unsent_.msg_iovlen != 0; }
  // Whether the kernel has taken a byte since forget().
  bool begun() const { return begun_; }
  // Drops the stripe.
  void forget();

  // Adds memory to send without a copy.
  void allow(const void* address, uint64_t nbytes);
  // Whether the slot's last message has left the allowed memory. If not, poll for no event: the
  // kernel's report makes the socket ready.
  bool left(uint32_t slot);

 private:
  bool cut_to_available(msghdr& run, iovec* ready, uint64_t available) const;
  void skip(std::size_t sent);

  Fd fd_;
  int64_t zero_copy_from_;
  bool same_host_;
  ZeroCopy zero_copy_;
  std::vector<uint64_t> marks_;  // per slot: the last send from allowed memory
  FrameHead head_{};
  uint64_t stripe_begin_ = 0;
  bool in_place_[1 + kMaxParts] = {};  // which pieces are sent without a copy
  iovec pieces_[1 + kMaxParts] = {};
  msghdr unsent_{};  // what the kernel has not taken yet
  bool begun_ = false;
  uint64_t sent_ = 0;  // bytes of the frame that it has taken
};

}  // namespace afd_comm
