// Backend tcp, receiver: one connection, from greeting to hang-up.
#pragma once

#include <sys/uio.h>

#include <array>

#include "landing.h"
#include "tcp_peer.h"

namespace afd_comm {

class TcpConnection {
 public:
  // `accelerator`: of the slots' device, null: host memory. `peers` must outlive the connection.
  TcpConnection(Fd fd, TcpPeers& peers, std::shared_ptr<Accelerator> accelerator);
  ~TcpConnection();  // ends its link
  TcpConnection(const TcpConnection&) = delete;

  // Reads available bytes, about one frame at most. Returns false if the connection must be
  // dropped. Trusts no input: any byte sequence gives a valid frame or false.
  bool on_readable();
  // Whether the last on_readable() stopped although more can be read.
  bool may_have_more() const { return !drained_; }
  // Whether the next stripe must wait for another one of its link.
  bool stalled() const { return phase_ == Phase::Turn; }
  // Whether a stripe that was read is still being copied to the slots' device. on_readable() tells
  // of those that are there.
  bool lands() const { return landing_stripes_ != 0; }
  // Waits for them. Returns false if the connection must be dropped.
  bool settle();
  // Whether a frame has begun to arrive, so that its rest is on the way.
  bool in_frame() const { return phase_ == Phase::Body || (phase_ == Phase::Head && have_ != 0); }

  int fd() const { return fd_.get(); }
  bool greeted() const { return phase_ > Phase::Greeting; }
  uint64_t accepted_ns() const { return accepted_ns_; }
  // Of its link; null before the greeting.
  const std::shared_ptr<TcpPeer>& peer() const { return peer_; }
  // In its link.
  uint32_t number() const { return hello_.number; }

 private:
  enum class Phase { Hello, Greeting, Head, Turn, Body };
  // Reads more of a fixed-size struct. Returns 1 if complete, 0 if bytes are missing, -1 if the
  // peer hung up.
  int fill(void* target, std::size_t size);
  bool accept_hello();
  bool accept_head();
  bool take_turn();
  bool read_body();
  bool read_into_device();
  bool deliver(const FrameHead& stripe, uint64_t nbytes);
  bool tell_landed(bool wait);

  Fd fd_;
  TcpPeers& peers_;
  std::shared_ptr<Accelerator> accelerator_;
  std::unique_ptr<Landing> landing_;  // made with the first frame
  struct Landed {
    FrameHead stripe;
    uint64_t nbytes = 0;
    uint64_t flushed = 0;  // see Landing::flushed
  };
  // A ring: stripes on their way to the device.
  std::array<Landed, 8> ring_;
  std::size_t first_landing_ = 0;
  std::size_t landing_stripes_ = 0;
  uint64_t accepted_ns_;
  Phase phase_ = Phase::Hello;
  std::shared_ptr<TcpPeer> peer_;
  bool drained_ = false;
  std::size_t have_ = 0;  // bytes of hello_ or head_ read so far
  Hello hello_{};
  FrameHead head_{};
  iovec pieces_[kMaxParts] = {};  // the rest of the body
  std::size_t next_piece_ = 0;
  std::size_t piece_count_ = 0;
  uint64_t nbytes_ = 0;  // of the body
};

}  // namespace afd_comm
