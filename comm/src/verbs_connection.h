// Backend verbs, receiver: one sender's connection, from greeting to hang-up.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "afd_comm/claims.h"
#include "verbs_landing.h"
#include "verbs_plan.h"
#include "verbs_qp.h"

namespace afd_comm {

// wr_id of the last receive that is posted to a queue pair before it is closed.
constexpr uint64_t kMarker = uint64_t{1} << 32;

// What all connections of a region share. Must outlive them.
struct VerbsHost {
  const Memory& memory;
  const Token& token;
  int claim_lock_fd;  // see take_claim
  VerbsOptions options;
  std::vector<std::shared_ptr<Nic>> nics;
  std::vector<std::size_t> port_nic;  // per port of the options, index into nics
  std::vector<PortName> ports;
  std::vector<Registration> payload;  // per NIC, all slots
  // Of slots on a device. `staged`: host memory that NICs write in place of the device's, if they
  // cannot write that. Else `flush`: whether their writes need a flush before a doorbell.
  std::shared_ptr<Accelerator> accelerator;
  std::unique_ptr<StageBuffer> staged;
  bool flush = false;
  int wake_fd;  // an eventfd that signals needs_drop()
};

// Holds a flag that is set for a few microseconds at a time.
class Turn {
 public:
  explicit Turn(std::atomic_flag& flag) : flag_(flag) {
    while (flag_.test_and_set(std::memory_order_acquire)) relax();
  }
  ~Turn() { flag_.clear(std::memory_order_release); }
  Turn(const Turn&) = delete;

 private:
  std::atomic_flag& flag_;
};

class VerbsConnection final : private CompletionSink, private Polled {
 public:
  VerbsConnection(Fd fd, VerbsHost& host);
  // Rings for all completely delivered messages, then writes nothing more and marks the writer of
  // its slots as gone.
  ~VerbsConnection() override;
  VerbsConnection(const VerbsConnection&) = delete;

  // Reads available bytes. Returns false if the connection must be dropped. Trusts no input.
  bool on_readable();
  // Whether the progress thread found invalid data, or a newer writer has the slots.
  bool needs_drop();
  void say_farewell(Status reason) const;
  // Takes the slots away from the connection, which writes nothing after this. Idempotent.
  void stop();

  int fd() const { return fd_.get(); }
  bool greeted() const { return phase_ != Phase::Hello; }
  uint64_t accepted_ns() const { return accepted_ns_; }
  SlotRange slots() const { return slots_; }

 private:
  enum class Phase { Hello, Connect, Ready };
  // The state of one slot for this sender. Only the progress threads write it.
  struct Incoming {
    std::atomic<uint64_t> arrivals{0};  // see verbs_plan.h
    uint32_t newest = 0;  // number of the last message that was complete; guarded by turning_
  };
  // A message that is complete, or one that was overwritten before its turn came.
  struct Arrived {
    enum class State { Unknown, Complete, Overwritten } state = State::Unknown;
    Record record;
  };
  struct Half {
    std::size_t nic = 0;
    std::unique_ptr<QueuePair> qp;
    std::atomic<bool> drained{false};
    bool closed = false;
  };

  int fill(void* target, std::size_t size);
  bool accept_hello();
  bool accept_connect();
  void connect(VerbsAccept& accept);
  bool answer_fence();
  bool close_half(std::size_t index);
  void on_completion(const ib::Wc& completion) override;
  void before(const ib::Wc* completions, int count) override;
  bool poll() override;
  bool armed() const override { return landing_->any(); }
  void arrived(Immediate immediate);
  void read_record(Immediate immediate, uint32_t stripes);
  bool land(const Record& record, uint32_t stripes);
  void deliver_in_turn(const Record& record);
  void deliver(const Record& record);
  bool ring_landed();
  void ring(const Record& record);
  void complain();
  template <typename Frame>
  bool answer(const Frame& frame) const;
  uint32_t slot_count() const;
  bool holds_slot(const Record& record) const;
  Poller& first_poller() const;

  Fd fd_;
  VerbsHost& host_;
  uint64_t accepted_ns_;
  Phase phase_ = Phase::Hello;
  SlotRange slots_;
  uint64_t serial_ = 0;
  std::size_t have_ = 0;  // bytes read of the current frame
  VerbsHello hello_{};
  VerbsConnect connect_{};
  VerbsFence fence_{};
  // Records and room for the test packet: all memory that a sender may write besides the payload.
  uint8_t* records_ = nullptr;
  uint64_t records_bytes_ = 0;
  std::vector<Registration> record_keys_;                 // per NIC
  std::vector<std::unique_ptr<CompletionQueue>> queues_;  // per NIC
  std::vector<std::unique_ptr<Half>> halves_;
  std::vector<Incoming> incoming_;
  // Turns: doorbells ring in the order of the posts, whichever paths the messages took.
  std::atomic_flag turning_ = ATOMIC_FLAG_INIT;  // guards the next three and Incoming::newest
  uint32_t next_ = 1;
  std::vector<Arrived> window_;            // by order modulo its size
  std::unique_ptr<VerbsLanding> landing_;  // if the host is staged; the first NIC's poller looks
  std::atomic<bool> broken_{false};
  bool stopped_ = false;
};

}  // namespace afd_comm
