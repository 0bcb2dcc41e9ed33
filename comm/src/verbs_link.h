// Backend verbs, sender. Set-up is in verbs_connect.cc, what happens after a failure in
// verbs_recovery.cc, what its proxy needs in verbs_driven.cc, the rest in verbs_link.cc.
//
// A message's payload is written by one stripe per path (queue pair), straight from registered
// memory or from this link's bounce buffer. The last work request of each stripe carries an
// immediate that names the stripe; that of the leading stripe also writes the record with header
// and flag. The receiver rings the doorbell once it has seen every stripe's immediate, each of
// which a reliable connection delivers behind the bytes it follows. When a path fails, the receiver
// is asked to close its end, so that nothing can arrive over it later. Stripes that had not arrived
// by then are sent again over the other paths.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driven_link.h"
#include "event_count.h"
#include "socket.h"
#include "verbs_plan.h"
#include "verbs_qp.h"

namespace afd_comm {

// Memory that messages may be sent from, registered with every NIC of the link.
struct VerbsSource {
  const uint8_t* begin = nullptr;
  uint64_t nbytes = 0;
  bool host = true;  // the CPU can read it
  uint64_t id = 0;   // of the device's allocation, 0: the caller takes care that it stays
  std::vector<Registration> keys;
  bool holds(const void* data, uint64_t n) const {
    const auto* at = static_cast<const uint8_t*>(data);
    return at >= begin && n <= nbytes && static_cast<uint64_t>(at - begin) <= nbytes - n;
  }
  bool overlaps(const VerbsSource& other) const {
    return begin < other.begin + other.nbytes && other.begin < begin + nbytes;
  }
};

// Work request id of the test packet over path `path`.
uint64_t verbs_test_id(uint32_t path);

class VerbsLink final : public DrivenLink, private CompletionSink {
 public:
  VerbsLink(const TcpAddress& address, const LinkOptions& options);
  ~VerbsLink() override;

  const char* backend() const override { return "verbs"; }
  bool may_block() const override { return true; }
  Status post(const Message& message) override;
  Status wait_sent(uint32_t slot, int64_t timeout_us) override;
  void register_memory(void* address, uint64_t nbytes, Device device) override;
  Start start(const Message& message, const Available* available, Status& outcome) override;
  std::optional<Status> go_on(uint32_t slot) override;
  Status give_up(uint32_t slot) override;
  bool sent(uint32_t slot) const override;
  Limits limits() const override { return {region_slots_, slot_bytes_, options_.slots}; }
  Status health() const override;
  bool reads_devices() const override { return !staged_; }
  bool adopt(const void* data, uint64_t nbytes, Device device) override;
  std::shared_ptr<Poller> poller() const override;
  // What was found at set-up, then the paths that failed and why the link ended.
  std::string notes() const override;
  void close() override;

 private:
  static constexpr std::size_t kMaxWrs = kMaxPieces + 1;
  static constexpr uint8_t kLost = 0x80;

  struct Path {
    std::size_t nic = 0;
    std::unique_ptr<QueuePair> qp;
    std::string peer_port;
    uint8_t remote_port = 0;  // index into VerbsWelcome::ports
    uint32_t payload_rkey = 0;
    uint32_t records_rkey = 0;
    std::atomic<int32_t> room{0};     // send work requests that fit now
    std::atomic<bool> tested{false};  // the test packet was delivered
    std::atomic<int> error{0};        // first failing ib::WcStatus
    // Used by the control thread only:
    uint64_t fence_deadline = 0;  // 0: not asked for
    bool fenced = false;
    std::vector<uint64_t> arrived;  // per slot, when the receiver closed its end
  };

  // A slot's message in flight. post() writes it while `open` is empty; after that only `open` and
  // `path` change.
  struct Outgoing {
    std::atomic<uint32_t> open{0};  // stripes without acknowledgement
    // Path of each stripe; with kLost the control thread has to send it again. One word, so that a
    // late failure report is not attributed to a newer path.
    std::array<std::atomic<uint8_t>, kMaxStripes> path{};
    std::array<std::atomic<uint16_t>, kMaxStripes> requests{};
    std::atomic<uint32_t> order{0};  // of its last message, in the link
    uint32_t number = 0;             // of its last message, in the slot
    bool traced = false;
    uint32_t seen = 0;  // control thread: order at the last look, 0 if all was acknowledged then
    StripePlan plan;
    Part parts[kMaxParts];
    const VerbsSource* sources[kMaxParts] = {};
    std::size_t part_count = 0;
    // A message whose bytes come by and by: see start().
    const Available* available = nullptr;
    uint32_t next = 0;  // stripe to send
  };

  // verbs_connect.cc
  void open_ports(const VerbsOptions& options);
  VerbsWelcome greet(const TcpAddress& address, uint64_t deadline);
  void make_paths(const VerbsOptions& options, const VerbsWelcome& welcome);
  void exchange(const TcpAddress& address, uint64_t deadline);
  void make_bounce();
  void test_paths(uint64_t deadline);
  void test_device();
  std::shared_ptr<const VerbsSource> make_source(void* address, uint64_t nbytes, Device device,
                                                 uint64_t id);

  // verbs_link.cc
  void on_completion(const ib::Wc& completion) override;
  Status outcome() const { return ended_.load(std::memory_order_acquire); }
  Status wait_acknowledged(const Outgoing& out, uint64_t deadline);
  Status check(const Message& message) const;
  // The oldest message without acknowledgement, if the receiver may have to remember too many.
  const Outgoing* window_is_full();
  Status wait_window(uint64_t deadline);
  Status prepare(uint32_t index, const Message& message, uint64_t posted);
  void add_source(std::shared_ptr<const VerbsSource> source);
  const VerbsSource* source_of(const Part& part) const;
  void send_stripes(uint32_t index);
  void send_stripe(uint32_t index, uint32_t stripe, uint32_t path);
  void lose(Outgoing& out, uint32_t stripe, uint32_t path);
  void fail_path(uint32_t path, int error);
  // `reason`: a string literal for notes(), or null.
  void end(Status why, const char* reason = nullptr);
  void wake_control() const;
  uint8_t* record_at(uint32_t index) const { return bounce_ + index * kRecordStride; }
  uint8_t* copy_at(uint32_t index) const { return bounce_ + copies_ + index * stride_; }

  // verbs_recovery.cc
  void run_control();
  bool read_reply();
  void take_reply(const VerbsReply& reply, const std::vector<uint64_t>& arrived);
  void ask_for_fences();
  void give_up_dead_ports();
  bool resend_lost();
  void resend(uint32_t index, uint32_t stripe, uint32_t from);

  LinkOptions options_;
  pid_t creator_;
  std::string notes_;
  uint32_t region_slots_ = 0;
  uint64_t slot_bytes_ = 0;
  uint64_t stride_ = 0;
  uint32_t payloads_ = 1;
  uint64_t least_stripe_ = 0;
  uint64_t most_piece_ = 0;  // bytes of one work request
  uint64_t remote_payload_ = 0;
  uint64_t remote_records_ = 0;
  bool remote_staged_ = false;  // the receiver wants extents
  uint32_t first_ = 0;          // slot of out_[0]

  // Destroyed in reverse order: paths before the queues they complete on.
  std::vector<std::shared_ptr<Nic>> nics_;
  std::vector<std::size_t> port_nic_;
  std::vector<PortFacts> ports_;
  std::vector<std::unique_ptr<CompletionQueue>> queues_;  // one per NIC
  std::vector<std::unique_ptr<Path>> paths_;
  std::vector<Outgoing> out_;
  uint8_t* bounce_ = nullptr;
  uint64_t bounce_bytes_ = 0;
  uint64_t copies_ = 0;
  bool staged_ = false;  // the NICs cannot read the device's memory
  std::mutex registering_;
  std::vector<std::shared_ptr<const VerbsSource>> sources_;  // entry 0 is the bounce buffer
  // post() reads this without a lock; earlier lists are kept for threads that still read them.
  using SourceList = std::vector<const VerbsSource*>;
  std::vector<std::unique_ptr<const SourceList>> source_lists_;
  std::atomic<const SourceList*> current_sources_{nullptr};

  std::atomic<uint32_t> order_{0};  // of the last message
  std::atomic<uint32_t> floor_{0};  // all up to this one were acknowledged at the last check
  std::atomic<uint32_t> alive_{0};  // bit per path
  std::atomic<Status> ended_{Status::Ok};
  std::atomic<const char*> reason_{nullptr};  // of the end
  std::atomic<bool> closed_{false};
  EventCount progress_;  // signals an acknowledgement or the end
  Fd fd_;
  Fd wake_;
  std::vector<uint8_t> inbox_;  // control thread: bytes of a reply so far
  uint64_t patience_ns_ = 0;    // longer than a NIC may take to acknowledge or fail a request
  uint64_t next_look_ns_ = 0;   // control thread: see give_up_dead_ports()
  std::thread control_;
};

}  // namespace afd_comm
