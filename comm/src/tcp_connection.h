// Backend tcp, receiver: one connection, from greeting to hang-up.
#pragma once

#include <sys/uio.h>

#include "afd_comm/claims.h"
#include "landing.h"
#include "tcp_wire.h"

namespace afd_comm {

class TcpConnection {
 public:
  // `claim_lock_fd`: see take_claim. `accelerator`: of the slots' device, null: host memory. All
  // references must outlive the connection.
  TcpConnection(Fd fd, const Memory& memory, const Token& token, int claim_lock_fd,
                std::shared_ptr<Accelerator> accelerator);
  ~TcpConnection();  // marks the writer of its slots as gone
  TcpConnection(const TcpConnection&) = delete;

  // Reads available bytes, about one frame at most. Returns false if the connection must be
  // dropped. Trusts no input: any byte sequence gives a valid frame or false.
  bool on_readable();
  // Whether the last on_readable() stopped although more can be read.
  bool may_have_more() const { return !drained_; }
  // Whether a frame has begun to arrive, so that its rest is on the way.
  bool in_frame() const { return phase_ == Phase::Body || (phase_ == Phase::Head && have_ != 0); }
  // Tells a greeted sender why its connection ends, if the socket has room.
  void say_farewell(Status reason) const;

  int fd() const { return fd_.get(); }
  bool greeted() const { return phase_ != Phase::Hello; }
  uint64_t accepted_ns() const { return accepted_ns_; }
  SlotRange slots() const { return slots_; }

 private:
  enum class Phase { Hello, Head, Body };
  // Reads more of a fixed-size struct. Returns 1 if complete, 0 if bytes are missing, -1 if the
  // peer hung up.
  int fill(void* target, std::size_t size);
  bool accept_hello();
  bool accept_head();
  bool read_body();
  bool read_into_device();
  bool deliver();

  Fd fd_;
  const Memory& memory_;
  const Token& token_;
  int claim_lock_fd_;
  std::shared_ptr<Accelerator> accelerator_;
  std::unique_ptr<Landing> landing_;  // made with the first frame
  uint64_t accepted_ns_;
  Phase phase_ = Phase::Hello;
  SlotRange slots_;
  uint64_t serial_ = 0;
  bool drained_ = false;
  std::size_t have_ = 0;  // bytes of hello_ or head_ read so far
  Hello hello_{};
  FrameHead head_{};
  iovec pieces_[kMaxParts] = {};  // the rest of the body
  std::size_t next_piece_ = 0;
  std::size_t piece_count_ = 0;
};

}  // namespace afd_comm
