// Link: the sender's side, to one peer's region. One implementation per backend.
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

struct LinkOptions {
  std::string backend = "auto";  // or a name in the registry (link.cc)
  SlotRange slots;               // what this link claims
  int64_t timeout_us = 0;        // bound of connecting, and of every post that has to wait
  Interrupt interrupt = nullptr;
  int64_t zero_copy_from = -1;  // tcp: least bytes of a part to send in place; -1: where it pays
  Device device;                // where the caller's parts and streams are; not cpu: backend ipc
  bool trace = false;           // whether messages carry their Times; see Link::set_trace
  std::optional<VerbsOptions> verbs;  // backend verbs needs them
};

class Link {
 public:
  explicit Link(bool trace) : trace_(trace) {}
  Link(const Link&) = delete;
  virtual ~Link() = default;
  virtual const char* backend() const = 0;
  // Whether post() may wait for the peer, so that a caller lets go of its locks first.
  virtual bool may_block() const = 0;
  // Writes the parts into the slot, then the header, then rings its doorbell. The caller's memory
  // may be reused on return, unless it is registered: see wait_sent(). Thread safe for distinct
  // slots. Never throws.
  virtual Status post(const Message& message) = 0;
  // post() in steps, so that a Group serves many links at once. begin() starts one and returns its
  // outcome, or nothing while it has to wait for pollable() to become writable; then advance() goes
  // on, and abandon() gives up. Between begin() and the outcome the thread must use no other
  // function of the link, and the message's parts must stay as they are.
  virtual std::optional<Status> begin(const Message& message) { return post(message); }
  virtual std::optional<Status> advance() { return Status::Ok; }
  virtual Status abandon() { return Status::Deadline; }
  virtual int pollable() const { return -1; }
  // Parts within this memory are sent from where they lie, by backends that can. It must stay
  // valid until the link is destroyed. Throws CommError.
  virtual void register_memory(void* /*address*/, uint64_t /*nbytes*/, Device /*device*/) {}
  // Ok once the slot's last message has left the caller's registered memory, which may then be
  // reused. Other backends have copied it: at once.
  virtual Status wait_sent(uint32_t /*slot*/, int64_t /*timeout_us*/) { return Status::Ok; }
  // What works, but not as it was asked for; empty when all is well.
  virtual std::string notes() const { return {}; }
  // As post(), but in order behind what `stream` was given, and without waiting: the parts are read
  // when the stream gets there. Throws CommError for a backend without streams and when the driver
  // refuses.
  virtual Status enqueue(Stream stream, const Message& message);
  // Gives the claim back: the peer sees the writer as gone. Idempotent.
  virtual void close() = 0;

  bool traced() const { return trace_.load(std::memory_order_relaxed); }
  void set_trace(bool on) { trace_.store(on, std::memory_order_relaxed); }

 private:
  std::atomic<bool> trace_;
};

// The times of a message posted at `posted` ns, but for those that are still to come.
Times times_of(const Message& message, uint64_t posted);

// Connects by the first usable backend. Throws CommError naming what was tried.
std::unique_ptr<Link> open_link(const std::vector<std::string>& addresses,
                                const LinkOptions& options);

// What every backend checks before it touches anything.
Status check_message(const Message& message, uint32_t slots, uint64_t slot_bytes,
                     SlotRange claimed);

}  // namespace afd_comm
