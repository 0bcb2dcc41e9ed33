// Link: the sender's connection to one peer's region. One implementation per backend.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "afd_comm/accelerator.h"
#include "afd_comm/address.h"
#include "afd_comm/types.h"
#include "afd_comm/verbs.h"

namespace afd_comm {

constexpr uint32_t kMaxTcpConnections = 8;

struct LinkOptions {
  std::string backend = "auto";  // or one of backend_names()
  SlotRange slots;               // the claimed slots
  int64_t timeout_us = 0;        // limit for connecting, and for every post that has to wait
  Interrupt interrupt = nullptr;
  int64_t zero_copy_from =
      -1;  // tcp: parts of at least this many bytes are sent without a copy; -1: if it pays
  // tcp: connections to the peer, at most kMaxTcpConnections; 0: by the number of CPUs.
  uint32_t tcp_connections = 0;
  // tcp over several connections: bytes of a stripe. Small enough that the connections end at about
  // the same time, large enough that a stripe takes longer than its system calls.
  uint64_t tcp_stripe_bytes = 256 * 1024;
  Device device;                      // where the caller's parts and streams are
  bool trace = false;                 // whether messages carry Times
  std::optional<VerbsOptions> verbs;  // backend verbs needs them
};

// What captures enqueued on a link, see Link::record.
class Recording {
 public:
  Recording() = default;
  Recording(const Recording&) = delete;
  virtual ~Recording() = default;
};

class Link {
 public:
  explicit Link(bool trace) : trace_(trace) {}
  Link(const Link&) = delete;
  virtual ~Link() = default;
  virtual const char* backend() const = 0;
  // Whether post() may wait for the peer. If so, callers release their locks first.
  virtual bool may_block() const = 0;
  // Writes the parts into the slot, then the header, then rings the doorbell. On return the caller
  // may reuse its memory, unless it is registered: see wait_sent(). Thread safe for distinct slots.
  // Never throws.
  virtual Status post(const Message& message) = 0;
  // post() in steps, so that a Group can serve many links at once. begin() starts a post. It
  // returns the outcome, or nothing if the post has to wait until pollable() is writable; then
  // advance() continues the post and abandon() gives it up. Between begin() and the outcome the
  // thread must not call another function of the link, and the message's parts must not change.
  virtual std::optional<Status> begin(const Message& message) { return post(message); }
  virtual std::optional<Status> advance() { return Status::Ok; }
  virtual Status abandon() { return Status::Deadline; }
  virtual int pollable() const { return -1; }
  // Lets backends that can send parts within this memory without a copy. The memory must stay valid
  // until the link is destroyed. Throws CommError.
  virtual void register_memory(void* /*address*/, uint64_t /*nbytes*/, Device /*device*/) {}
  // Waits until the slot's last message has left the caller's registered memory, which may then be
  // reused. Returns Ok at once for backends that copy.
  virtual Status wait_sent(uint32_t /*slot*/, int64_t /*timeout_us*/) { return Status::Ok; }
  // Deviations from what was requested, such as a port that is down, then what failed since. Empty
  // if there are none.
  virtual std::string notes() const { return {}; }
  // Like post(), but in stream order and without waiting: the parts are read when `stream` reaches
  // this point, or later. They must not change until the message is answered. May be captured.
  //
  // `count`: null, or a word of host memory that earlier work of the stream writes. When the
  // message is sent, the word says how many of its header.count items go out: every part but the
  // last `message.whole` ones is an array of header.count items and is cut behind them, and the
  // receiver's header holds the word's count and the bytes sent. A larger word than header.count
  // ends the link with BadHeader. Backend ipc sends all items and header.count, because only a
  // kernel could read the word.
  //
  // tcp and verbs: a thread sends the message when the stream has come by. If that fails, nothing
  // rings, so the peer's Guard acts; status() and later calls return why. Messages that different
  // slots are sent at the same time may arrive in either order.
  //
  // Throws CommError for a backend without streams, and if the driver refuses.
  virtual Status enqueue(Stream stream, const Message& message, const uint32_t* count);
  // Messages that captures enqueue from now on belong to the returned recording, until the next
  // call. Destroy it when no graph that holds them will run again: this frees what they need.
  // Without a recording that lives as long as the link.
  virtual std::unique_ptr<Recording> record() { return std::make_unique<Recording>(); }
  // Whether messages leave without a call of the device's driver by a thread of this process. If
  // not, they may be stuck behind a call of another thread that waits for the device.
  virtual bool sends_alone() const { return true; }
  // Ok, or why an enqueued message was not sent. Thread safe.
  virtual Status status() const { return Status::Ok; }
  // Like begin(), for parts that do not change before the peer's next message: the outcome need not
  // wait until they have been read.
  virtual std::optional<Status> begin_kept(const Message& message) { return begin(message); }
  // Releases the claim: the peer sees the writer as gone. Idempotent.
  virtual void close() = 0;

  bool traced() const { return trace_.load(std::memory_order_relaxed); }
  virtual void set_trace(bool on) { trace_.store(on, std::memory_order_relaxed); }

 private:
  std::atomic<bool> trace_;
};

// Returns the times of a message posted at `posted` ns that are known at that moment.
Times times_of(const Message& message, uint64_t posted);

// Names of all backends, in order of preference.
std::vector<std::string> backend_names();

// Connects by the first usable backend. Throws CommError naming what was tried.
std::unique_ptr<Link> open_link(const std::vector<std::string>& addresses,
                                const LinkOptions& options);

// The checks that every backend makes before it writes anything.
Status check_message(const Message& message, uint32_t slots, uint64_t slot_bytes,
                     SlotRange claimed);

}  // namespace afd_comm
