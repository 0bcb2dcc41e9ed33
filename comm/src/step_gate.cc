#include "afd_comm/step_gate.h"

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "poller.h"
#include "stream_watch.h"

namespace afd_comm {
namespace {

// Words that a stream and the CPU share. Each has a cache line of its own, since one is written by
// the CPU and the other by the device.
struct alignas(kLine) Word {
  std::atomic<uint64_t> value{0};
};

// In pages of their own: a driver refuses to page-lock a page twice.
constexpr std::align_val_t kAlignment{kPage};
struct FreeWords {
  void operator()(Word* words) const { ::operator delete(words, kAlignment); }
};
using Words = std::unique_ptr<Word[], FreeWords>;

std::size_t bytes_of_words(std::size_t count) { return round_up(count * sizeof(Word), kPage); }

Words make_words(std::size_t count) {
  auto* const memory = static_cast<Word*>(::operator new(bytes_of_words(count), kAlignment));
  std::uninitialized_default_construct_n(memory, count);
  return Words(memory);
}

const std::vector<uint32_t> kNone;

struct Lane {
  enum class State {
    Requests,  // the gate waits for the peers
    Work,      // the stream is at it
    Answers,   // they are being sent
  };
  Word* gate = nullptr;    // the stream may pass the waits up to this number
  Word* ticket = nullptr;  // the answers up to this number may be sent
  const std::vector<uint32_t>* numbers = &kNone;
  std::size_t turn = 0;  // which of the numbers
  State state = State::Requests;
  std::vector<uint32_t> missing;  // peers whose request is awaited

  bool over() const { return turn == numbers->size(); }
  uint32_t number() const { return (*numbers)[turn]; }
};

struct Peer {
  Link* link = nullptr;
  uint32_t slot = 0;
  uint64_t first_flag = 0;
  // Of the step.
  uint32_t depth = 0;
  std::vector<int32_t> counts;    // by lane
  std::vector<int32_t> firsts;    // likewise
  Status status = Status::Ok;     // else the peer is left out from then on
  std::vector<uint32_t> waiting;  // lanes whose answer is to be sent, in order
  bool sending = false;           // the first of them has begun
  Message message;                // that one

  bool takes_part(uint32_t lane) const { return lane < depth && status == Status::Ok; }
  bool owes(uint32_t lane) const {
    return std::find(waiting.begin(), waiting.end(), lane) != waiting.end();
  }
};

}  // namespace

StepPlan::StepPlan(std::vector<Position> positions, uint32_t lanes, uint32_t stride)
    : positions_(std::move(positions)), numbers_(lanes), stride_(stride) {
  if (positions_.empty()) throw CommError("a step needs at least one position");
  for (std::size_t i = 0; i < positions_.size(); ++i) {
    if (positions_[i].lane >= lanes)
      throw CommError("lane " + std::to_string(positions_[i].lane) + " of a step with " +
                      std::to_string(lanes) + " lanes; number lanes from 0");
    numbers_[positions_[i].lane].push_back(static_cast<uint32_t>(i + 1));
  }
}

class StepGate::Step final : public Polled {
 public:
  Step(Region& region, uint32_t peers, uint32_t lanes)
      : peers_(peers),
        region_(region),
        words_(make_words(2 * std::size_t{lanes})),
        accelerator_(open_accelerator(region.device())),
        pinned_(accelerator_, words_.get(), bytes_of_words(2 * std::size_t{lanes})),
        lanes_(lanes),
        statuses_(peers, Status::Ok),
        poller_(Poller::shared()) {
    for (uint32_t m = 0; m < lanes; ++m) {
      lanes_[m].gate = &words_[2 * std::size_t{m}];
      lanes_[m].ticket = &words_[2 * std::size_t{m} + 1];
      lanes_[m].missing.reserve(peers);
    }
    for (Peer& peer : peers_) {
      peer.counts.resize(lanes);
      peer.firsts.resize(lanes);
      peer.waiting.reserve(lanes);
    }
    event_ = accelerator_->make_event(false);
    poller_->add(*this);
  }

  ~Step() override {
    poller_->remove(*this);
    accelerator_->destroy_event(event_);
  }

  // The caller's thread.

  std::size_t lanes() const { return lanes_.size(); }
  const std::vector<Status>& statuses() const { return statuses_; }

  void enqueue(Stream stream, StreamOp::Kind kind, uint32_t lane, uint32_t number) {
    const Lane& at = lanes_.at(lane);
    Word* const word = kind == StreamOp::Kind::Write ? at.ticket : at.gate;
    const StreamOp op{kind, pinned_.at(&word->value), number};
    accelerator_->run(stream, &op, 1);
  }

  void begin(std::shared_ptr<const StepPlan> plan, const int32_t* depths, const int32_t* counts,
             int64_t late_us, const int32_t* firsts) {
    if (running()) throw CommError("the last step of this gate has not ended; wait for it first");
    if (plan->lanes() > lanes_.size())
      throw CommError("a step of " + std::to_string(plan->lanes()) + " lanes for a gate of " +
                      std::to_string(lanes_.size()));
    for (std::size_t i = 0; i < peers_.size(); ++i)
      if (depths[i] > 0 && peers_[i].link == nullptr)
        throw CommError("peer " + std::to_string(i) + " takes part in a step but is not set");
    plan_ = std::move(plan);
    follow_counts_ = firsts != nullptr;
    late_ns_ = static_cast<uint64_t>(std::max<int64_t>(late_us, 0)) * 1000;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      Peer& peer = peers_[i];
      peer.depth = static_cast<uint32_t>(std::max(depths[i], 0));
      std::copy_n(counts + i * lanes_.size(), lanes_.size(), peer.counts.begin());
      if (firsts != nullptr)
        std::copy_n(firsts + i * lanes_.size(), lanes_.size(), peer.firsts.begin());
      peer.status = Status::Ok;
      peer.waiting.clear();
      peer.sending = false;
    }
    for (uint32_t m = 0; m < lanes_.size(); ++m) {
      Lane& lane = lanes_[m];
      lane.gate->value.store(0, std::memory_order_relaxed);
      lane.ticket->value.store(0, std::memory_order_relaxed);
      lane.numbers = m < plan_->lanes() ? &plan_->numbers(m) : &kNone;
      lane.turn = 0;
      await(m);
    }
    moved_ = now_ns();
    next_writer_ = moved_ + kWriterNs;
    busy_since_.store(0, std::memory_order_relaxed);
    cancelled_.store(false, std::memory_order_relaxed);
    running_.store(true, std::memory_order_release);
    poller_->wake();
  }

  bool wait(Stream stream, Interrupt interrupt) {
    accelerator_->record(event_, stream);
    uint64_t next_interrupt = now_ns() + kWriterNs;
    uint64_t ended = 0;
    while (true) {
      const bool over = !running();
      if (over && accelerator_->done(event_)) return false;
      const uint64_t now = now_ns();
      if (over && ended == 0) ended = now;
      const uint64_t since = over ? ended : busy_since_.load(std::memory_order_acquire);
      if (since != 0 && now > since + kStuckNs)
        throw CommError("a stream of region '" + region_.name() +
                        "' did not finish although its requests are here; other work on it "
                        "hangs: restart the process");
      if (now >= next_interrupt) {
        next_interrupt = now + kWriterNs;
        if (interrupt != nullptr && interrupt()) return true;
      }
      nap(kLookNs);
    }
  }

  void cancel() {
    cancelled_.store(true, std::memory_order_release);
    poller_->wake();
    while (running()) nap(kLookNs);
  }

  // The poller's thread.

  bool armed() const override { return running(); }

  bool poll() override {
    if (!running()) return false;
    if (cancelled_.load(std::memory_order_acquire)) {
      finish();
      return true;
    }
    bool found = false;
    for (uint32_t m = 0; m < lanes_.size(); ++m) found = advance(m) || found;
    const uint64_t now = now_ns();
    if (found) moved_ = now;
    if (now >= next_writer_) {
      next_writer_ = now + kWriterNs;
      leave_out_gone();
    }
    const Lane* const first = earliest();
    if (first == nullptr) {
      finish();
      return true;
    }
    // While the stream works, no peer is late: it may wait for these answers.
    const bool works = first->state == Lane::State::Work;
    busy_since_.store(works ? moved_ : 0, std::memory_order_release);
    if (!works && now - moved_ > late_ns_) {
      leave_out_late(*first);
      moved_ = now;
    }
    return found;
  }

  std::vector<Peer> peers_;

 private:
  bool running() const { return running_.load(std::memory_order_acquire); }

  // Of the peer's message at the lane's position.
  uint64_t flag(const Peer& peer, uint32_t lane) const {
    return peer.first_flag + uint64_t{lanes_[lane].turn} * peer.depth + lane;
  }

  void await(uint32_t m) {
    Lane& lane = lanes_[m];
    lane.state = Lane::State::Requests;
    lane.missing.clear();
    if (lane.over()) return;
    for (uint32_t i = 0; i < peers_.size(); ++i)
      if (peers_[i].takes_part(m)) lane.missing.push_back(i);
  }

  bool advance(uint32_t m) {
    Lane& lane = lanes_[m];
    if (lane.over()) return false;
    switch (lane.state) {
      case Lane::State::Requests:
        return open(m);
      case Lane::State::Work:
        if (lane.ticket->value.load(std::memory_order_acquire) < lane.number()) return false;
        lane.state = Lane::State::Answers;
        for (Peer& peer : peers_)
          if (peer.takes_part(m)) peer.waiting.push_back(m);
        [[fallthrough]];
      case Lane::State::Answers:
        return answer(m);
    }
    return false;
  }

  // Lets the stream pass once no request is missing.
  bool open(uint32_t m) {
    Lane& lane = lanes_[m];
    const std::size_t before = lane.missing.size();
    for (std::size_t i = 0; i < lane.missing.size();) {
      const Peer& peer = peers_[lane.missing[i]];
      if (peer.status == Status::Ok && !region_.ready(peer.slot + m, flag(peer, m))) {
        ++i;
        continue;
      }
      // The next step awaits the same flag again.
      if (lane.numbers->size() == 1) region_.set_doorbell(peer.slot + m, 0);
      lane.missing[i] = lane.missing.back();
      lane.missing.pop_back();
    }
    if (!lane.missing.empty()) return lane.missing.size() != before;
    lane.state = Lane::State::Work;
    lane.gate->value.store(lane.number(), std::memory_order_release);
    return true;
  }

  // Sends the lane's answers. Returns whether all are sent, or something was.
  bool answer(uint32_t m) {
    bool found = false, left = false;
    for (Peer& peer : peers_) {
      if (!peer.owes(m)) continue;
      found = send(peer) || found;
      left = left || peer.owes(m);
    }
    if (left) return found;
    ++lanes_[m].turn;
    await(m);
    return true;
  }

  // Sends what can be sent without waiting. Returns whether an answer was finished.
  bool send(Peer& peer) {
    bool found = false;
    while (!peer.waiting.empty()) {
      std::optional<Status> outcome;
      if (peer.sending) {
        outcome = peer.link->advance();
      } else {
        fill(peer, peer.waiting.front());
        outcome = peer.link->begin_kept(peer.message);
      }
      peer.sending = !outcome;
      if (!outcome) return found;
      found = true;
      peer.waiting.erase(peer.waiting.begin());
      if (*outcome != Status::Ok) leave_out(peer, *outcome);
    }
    return found;
  }

  void fill(Peer& peer, uint32_t m) const {
    const auto index = static_cast<uint64_t>(&peer - peers_.data());
    int64_t items = peer.counts[m];
    if (follow_counts_)
      items = std::min(items, int64_t{region_.header(peer.slot + m).count} - peer.firsts[m]);
    const auto count = static_cast<uint64_t>(std::max<int64_t>(items, 0));
    Message& message = peer.message;
    message = plan_->position(lanes_[m].number() - 1).answer;
    message.flag = flag(peer, m);
    message.header.count = static_cast<uint32_t>(count);
    message.header.nbytes = 0;
    for (std::size_t i = 0; i < message.part_count; ++i) {
      Part& part = message.parts[i];
      part.data = static_cast<const uint8_t*>(part.data) + index * plan_->stride() * part.nbytes;
      part.nbytes *= count;
      message.header.nbytes += static_cast<int64_t>(part.nbytes);
    }
  }

  // The lane whose position comes first in the order of the step; null if all are over.
  const Lane* earliest() const {
    const Lane* first = nullptr;
    for (const Lane& lane : lanes_)
      if (!lane.over() && (first == nullptr || lane.number() < first->number())) first = &lane;
    return first;
  }

  void leave_out(Peer& peer, Status status) {
    if (peer.sending) peer.link->abandon();
    peer.sending = false;
    peer.waiting.clear();
    peer.status = status;
  }

  void leave_out_gone() {
    for (const Lane& lane : lanes_)
      for (const uint32_t i : lane.missing) {
        Peer& peer = peers_[i];
        if (peer.status == Status::Ok && region_.gone(peer.slot)) leave_out(peer, Status::PeerGone);
      }
  }

  // Everything before this lane's position is answered, so its peers have all that they need.
  void leave_out_late(const Lane& lane) {
    const auto m = static_cast<uint32_t>(&lane - lanes_.data());
    for (const uint32_t i : lane.missing)
      if (peers_[i].status == Status::Ok) leave_out(peers_[i], Status::Deadline);
    for (Peer& peer : peers_)
      if (peer.owes(m)) leave_out(peer, Status::Deadline);
  }

  void finish() {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (peers_[i].sending) leave_out(peers_[i], Status::Closed);
      statuses_[i] = peers_[i].status;
    }
    running_.store(false, std::memory_order_release);
  }

  Region& region_;
  const Words words_;
  std::shared_ptr<Accelerator> accelerator_;
  Pinned pinned_;
  std::vector<Lane> lanes_;
  std::vector<Status> statuses_;
  Event event_ = nullptr;
  std::shared_ptr<const StepPlan> plan_;
  bool follow_counts_ = false;
  uint64_t late_ns_ = 0;
  uint64_t moved_ = 0;  // when the step came on
  uint64_t next_writer_ = 0;
  // While it is true, what is above belongs to the poller's thread, else to the caller's.
  std::atomic<bool> running_{false};
  std::atomic<bool> cancelled_{false};
  std::atomic<uint64_t> busy_since_{0};  // the stream works since then; 0: a peer is awaited
  std::shared_ptr<Poller> poller_;
};

StepGate::StepGate(Region& region, uint32_t peers, uint32_t lanes)
    : step_(std::make_unique<Step>(region, peers, lanes)) {}

StepGate::~StepGate() = default;

uint32_t StepGate::peers() const { return static_cast<uint32_t>(step_->peers_.size()); }
uint32_t StepGate::lanes() const { return static_cast<uint32_t>(step_->lanes()); }

void StepGate::set_peer(uint32_t peer, Link* link, uint32_t first_slot, uint64_t first_flag) {
  Peer& at = step_->peers_.at(peer);
  at.link = link;
  at.slot = first_slot;
  at.first_flag = first_flag;
}

void StepGate::enqueue_wait(Stream stream, uint32_t lane, uint32_t number) {
  // Not WaitEqual: where no peer is left, the gate runs ahead of the stream.
  step_->enqueue(stream, StreamOp::Kind::WaitAtLeast, lane, number);
}

void StepGate::enqueue_ticket(Stream stream, uint32_t lane, uint32_t number) {
  step_->enqueue(stream, StreamOp::Kind::Write, lane, number);
}

void StepGate::begin(std::shared_ptr<const StepPlan> plan, const int32_t* depths,
                     const int32_t* counts, int64_t late_us, const int32_t* firsts) {
  step_->begin(std::move(plan), depths, counts, late_us, firsts);
}

bool StepGate::wait(Stream stream, Interrupt interrupt) { return step_->wait(stream, interrupt); }

void StepGate::cancel() { step_->cancel(); }

const std::vector<Status>& StepGate::statuses() const { return step_->statuses(); }

}  // namespace afd_comm
