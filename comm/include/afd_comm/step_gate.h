// StepGate: the CPU's part of a step that a stream runs, for one receiver with many peers.
//
// A stream could wait for the doorbell of every peer itself. But then a captured graph depends on
// who takes part in the step, and each wait takes 1.5 us of the device's front end. With a gate the
// stream waits for one word per position, and a thread decides who is waited for:
//
//   peers' doorbells -> gate thread -> gate word -> stream: wait, work, write the answers
//   peers' slots     <- gate thread <- ticket   <- stream: write
//
// So a graph holds nothing that changes from step to step, and no address of a peer. A peer that is
// absent, gone or late is not waited for and gets nothing: it may still read the last answer in its
// slot, and a flag that it does not expect could satisfy a wait of a later step.
//
// A step has numbered positions, from 1, in the order in which peers send them. Each belongs to a
// lane (a micro-batch). A lane alternates: the requests of a position, its answers, the requests of
// the next. Lanes are independent. Number and lane are all that the gate knows of a model.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "afd_comm/link.h"
#include "afd_comm/region.h"

namespace afd_comm {

class Polled;

// What a stream sends at the positions of a step: the constants of a graph.
class StepPlan {
 public:
  struct Position {
    uint32_t lane;
    // Each part is an array of items: the address of item 0 and the bytes of one. The items of peer
    // i begin at item i * stride. Flag, count and nbytes are set for each peer. The memory must not
    // change until the lane's next position.
    Message answer;
  };
  // Throws CommError if a lane is not below `lanes`, or there is no position.
  StepPlan(std::vector<Position> positions, uint32_t lanes, uint32_t stride);

  // By number minus 1.
  const Position& position(std::size_t index) const { return positions_[index]; }
  std::size_t size() const { return positions_.size(); }
  // The numbers of a lane's positions, ascending.
  const std::vector<uint32_t>& numbers(uint32_t lane) const { return numbers_[lane]; }
  uint32_t lanes() const { return static_cast<uint32_t>(numbers_.size()); }
  uint32_t stride() const { return stride_; }

 private:
  std::vector<Position> positions_;
  std::vector<std::vector<uint32_t>> numbers_;
  uint32_t stride_;
};

// One thread at a time may call its functions. Between begin() and the end of wait() it must not
// call set_peer().
class StepGate {
 public:
  // `region`: where the requests arrive; it must outlive the gate. At most `peers` peers and
  // `lanes` lanes. Throws CommError.
  StepGate(Region& region, uint32_t peers, uint32_t lanes);
  ~StepGate();
  StepGate(const StepGate&) = delete;

  uint32_t peers() const;
  uint32_t lanes() const;

  // The peer's requests of lane m arrive in slot `first_slot` + m. Its flags count up from
  // `first_flag`, in the order in which it sends; an answer has the flag of its request. `link`
  // must stay until the peer is replaced; null: there is no such peer.
  void set_peer(uint32_t peer, Link* link, uint32_t first_slot, uint64_t first_flag);

  // The stream waits until the requests of position `number` are here.
  void enqueue_wait(Stream stream, uint32_t lane, uint32_t number);
  // Behind the work that writes its answers: they may be sent.
  void enqueue_ticket(Stream stream, uint32_t lane, uint32_t number);

  // Call it before the stream gets the step. Arrays by peer: `depths`, the number of lanes that the
  // peer takes part in, the first ones; 0: absent. `counts`, [peers][lanes], the items of its
  // answers. `late_us`: how long a peer may take for its next request after all that it depends on
  // has been answered. `firsts`: null, or [peers][lanes], the item of the request that is the
  // answer's first one; then an answer has no item beyond those that the request's header counts.
  // Throws CommError if a peer that takes part is not set.
  void begin(std::shared_ptr<const StepPlan> plan, const int32_t* depths, const int32_t* counts,
             int64_t late_us, const int32_t* firsts = nullptr);
  // Waits until the stream has finished and every answer is sent. Returns true if `interrupt` ended
  // the wait. Throws CommError if the stream does not finish although its requests are here.
  bool wait(Stream stream, Interrupt interrupt);
  // Ends a step whose stream has failed.
  void cancel();
  // Of each peer in the last step: Ok, PeerGone, Deadline, or why its answer could not be sent.
  const std::vector<Status>& statuses() const;

 private:
  class Step;
  std::unique_ptr<Step> step_;
};

}  // namespace afd_comm
