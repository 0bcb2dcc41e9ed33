// ProxyLink: lets streams send over a link that only the CPU can drive (tcp, verbs).
//
// A graph cannot call a socket or a NIC. So enqueue() prepares the message and gives the stream one
// operation: to write the message's ticket into a page-locked cell of the slot. A poller's thread
// sees the ticket, resets the cell and sends the message. One cell per slot is enough, because a
// slot's next message follows the answer to its last one.
//
// Where the parts are device memory that the link cannot send in place, the poller's thread copies
// them to the host first, in chunks (stage.h). The ticket follows the data in stream order, so the
// copies wait for nothing.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "driven_link.h"
#include "stage.h"
#include "tickets.h"

namespace afd_comm {

class ProxyLink final : public Link, private Polled {
 public:
  ProxyLink(std::unique_ptr<DrivenLink> link, const LinkOptions& options);
  ~ProxyLink() override;

  const char* backend() const override { return link_->backend(); }
  bool may_block() const override { return true; }
  Status post(const Message& message) override;
  std::optional<Status> begin(const Message& message) override;
  std::optional<Status> begin_kept(const Message& message) override;
  std::optional<Status> advance() override { return link_->advance(); }
  Status abandon() override { return link_->abandon(); }
  int pollable() const override { return link_->pollable(); }
  void register_memory(void* address, uint64_t nbytes, Device device) override {
    link_->register_memory(address, nbytes, device);
  }
  Status wait_sent(uint32_t slot, int64_t timeout_us) override {
    return link_->wait_sent(slot, timeout_us);
  }
  std::string notes() const override;
  bool sends_alone() const override;
  Status enqueue(Stream stream, const Message& message, const uint32_t* count) override;
  std::unique_ptr<Recording> record() override;
  Status status() const override;
  void close() override;
  void set_trace(bool on) override;

 private:
  struct alignas(64) Cell {
    std::atomic<Ticket> ticket;
  };
  // A slot that messages were enqueued for. The poller's thread alone uses the last two.
  struct Used {
    uint32_t slot = 0;
    std::atomic<const StageBuffer*> buffer{nullptr};
    Ticket ticket = kNoTicket;  // taken from the cell and not sent yet
    uint64_t deadline = 0;      // 0: none yet
  };
  // The message that is sent in several steps, if any.
  struct Current {
    Used* used = nullptr;
    Message message;
    bool begun = false;
  };

  bool in_place(const Message& message);
  std::unique_ptr<StageBuffer> make_buffer(uint64_t nbytes);
  Status post_staged(const Message& message);

  // Under mutex_.
  void start_proxy();
  Used& use(uint32_t slot);
  Cell& cell(uint32_t slot) const { return cells_[slot - limits_.claimed.first]; }

  // On the poller's thread. They return whether there was work.
  bool poll() override;
  bool armed() const override;
  bool take(Used& used);
  bool step();
  bool is_late(Used& used);
  bool finish(Used& used, Status outcome);
  bool is_idle() const;

  LinkOptions options_;
  pid_t creator_;
  std::unique_ptr<DrivenLink> link_;
  Limits limits_;
  std::shared_ptr<Tickets> tickets_ = std::make_shared<Tickets>();
  std::atomic<Status> status_{Status::Ok};  // the first failure of a ticket
  std::atomic<bool> closed_{false};
  std::atomic<bool> staged_{false};        // whether a message ever was
  std::atomic<bool> cannot_adopt_{false};  // the link failed to register device memory

  std::mutex mutex_;  // guards what enqueue() sets up
  std::shared_ptr<Accelerator> accelerator_;
  std::shared_ptr<Poller> poller_;
  uint64_t cells_bytes_ = 0;
  Cell* cells_ = nullptr;
  std::unique_ptr<Pinned> pinned_;
  std::vector<std::unique_ptr<StageBuffer>> buffers_;
  std::vector<std::unique_ptr<Used>> used_;  // of this size from the start; the first are set
  std::atomic<uint32_t> used_count_{0};

  std::unique_ptr<Stage> stage_;  // of the poller's thread, made before its first staged ticket
  Current current_;
  std::atomic<uint32_t> open_{0};  // tickets taken and not finished

  std::mutex posting_;  // one staged post at a time; guards the rest
  std::unique_ptr<Stage> post_stage_;
  std::unique_ptr<StageBuffer> post_buffer_;
  std::vector<std::unique_ptr<StageBuffer>> old_buffers_;
};

// The message with `rows` of its header.count items: every part is shortened in proportion, but for
// the last `whole` ones.
// rows must not exceed header.count. Pure.
void keep_rows(Message& message, uint32_t rows);
// Whether every such part is an array of header.count items, so that keep_rows() can shorten it.
// Pure.
bool has_rows(const Message& message);

}  // namespace afd_comm
