// Backend tcp, receiver: the links that write into a region. What the connections of one link share
// is its claim and the order of its messages.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "afd_comm/claims.h"
#include "tcp_wire.h"

namespace afd_comm {

// Thread safe. Lives as long as one of its connections.
class TcpPeer {
 public:
  TcpPeer(const Memory& memory, SlotRange slots, uint64_t serial);
  ~TcpPeer();  // marks the writer of its slots as gone
  TcpPeer(const TcpPeer&) = delete;

  SlotRange slots() const { return slots_; }
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // Whether no newer link has claimed the slot.
  bool holds(uint32_t slot) const { return serial_ == 0 || holds_claim(memory_, slot, serial_); }

  // Adds a connection's socket, which must be open until leave(). The first added is the one that
  // hears end()'s reason.
  void join(int fd);
  void leave(int fd);
  // Hangs up all connections.
  void end(std::optional<Status> reason);

  // Whether the bytes of a stripe may be written: Later while an earlier message may still be
  // written into the same slot, Never if the link must be dropped.
  enum class Turn { Now, Later, Never };
  Turn turn(const FrameHead& stripe);
  // The stripe's bytes are in the slot. Rings for every message that is complete, in the order of
  // the link's posts. Returns false if the link must be dropped.
  bool arrived(const FrameHead& stripe, uint64_t nbytes);

 private:
  // Messages that have begun to arrive.
  static constexpr std::size_t kWindow = 64;
  struct Message {
    FrameHead first{};     // of the stripe that came first; sequence 0: none
    uint32_t arrived = 0;  // stripes
    uint64_t bytes = 0;    // of them
    bool whole() const { return arrived == first.stripes; }
  };
  Message& at(uint64_t sequence) { return messages_[sequence % kWindow]; }
  bool ring(const FrameHead& message) const;

  const Memory& memory_;
  const SlotRange slots_;
  const uint64_t serial_;
  std::atomic<bool> ended_{false};
  std::mutex mutex_;  // guards the members below
  std::vector<int> fds_;
  uint64_t next_ = 1;  // the message that rings next
  std::array<Message, kWindow> messages_;
};

// All links of a region. For one thread at a time.
class TcpPeers {
 public:
  // `claim_lock_fd`: see take_claim. All references must outlive this and the peers.
  TcpPeers(const Memory& memory, const Token& token, int claim_lock_fd)
      : memory_(memory), token_(token), claim_lock_fd_(claim_lock_fd) {}

  const Memory& memory() const { return memory_; }
  // Checks a greeting and fills in the answer. Returns the link that the connection belongs to, or
  // null if the connection must be dropped; a magic number of 0 in the answer means: send none.
  std::shared_ptr<TcpPeer> greet(const Hello& hello, Welcome& answer);
  // The other links whose slots overlap those of a new one.
  std::vector<std::shared_ptr<TcpPeer>> older(const TcpPeer& newcomer);

 private:
  const Memory& memory_;
  const Token& token_;
  int claim_lock_fd_;
  std::unordered_map<uint64_t, std::weak_ptr<TcpPeer>> peers_;
};

}  // namespace afd_comm
