// Backend verbs: one opened RDMA device of this process, and what is made from it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "afd_comm/accelerator.h"
#include "afd_comm/verbs.h"
#include "verbs_progress.h"

namespace afd_comm {

struct PortFacts {
  std::string name;  // "device:port"
  uint8_t number = 1;
  bool active = false;
  uint8_t link_layer = ib::kLinkUnspecified;
  uint8_t mtu = 0;  // 1: 256 bytes ... 5: 4096
  uint16_t lid = 0;
  int gid_index = 0;
  ib::Gid gid = {};
  uint32_t max_message = 0;  // bytes of one work request
};

class Nic : public std::enable_shared_from_this<Nic> {
 public:
  // Opens the device, or returns the device that this process already opened with the same library
  // and spin time. Throws CommError.
  static std::shared_ptr<Nic> open(const VerbsOptions& options, const std::string& device);
  ~Nic();
  Nic(const Nic&) = delete;

  const Verbs& verbs() const { return verbs_; }
  const std::string& name() const { return name_; }
  ib::Context* context() const { return context_; }
  ib::Pd* pd() const { return pd_; }
  ib::CompChannel* channel() const { return channel_; }
  Progress& progress() const { return *progress_; }
  int max_qp_wr() const { return limits_.max_qp_wr; }
  int max_cqe() const { return limits_.max_cqe; }
  // Whether the port is up now.
  bool active(uint8_t number) const;
  // `gid_index` -1: the first RoCE v2 address. Throws CommError if the port or index does not
  // exist.
  PortFacts port(uint8_t number, int gid_index) const;
  // Why the NIC cannot reach memory of this device; "": it can. Tested once, because freeing the
  // sample waits for an idle device: a link is also made while a stream waits for the lost peer.
  std::string refuses(Device device);

 private:
  Nic(const Verbs& verbs, std::string name, uint64_t spin_ns);
  const Verbs& verbs_;
  std::string name_;
  ib::Context* context_ = nullptr;
  ib::Pd* pd_ = nullptr;
  ib::CompChannel* channel_ = nullptr;
  ib::DeviceAttr limits_{};
  std::unique_ptr<Progress> progress_;
  pid_t creator_;
  std::mutex testing_;
  std::map<std::pair<DeviceKind, int>, std::string> refusals_;  // of devices tested so far
};

// A completion queue that the NIC's progress thread polls for `sink`.
class CompletionQueue {
 public:
  CompletionQueue(std::shared_ptr<Nic> nic, int entries, CompletionSink* sink);
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  ib::Cq* get() const { return cq_; }
  // After this the sink is not called, and queue pairs may be destroyed. Idempotent.
  void detach();

 private:
  std::shared_ptr<Nic> nic_;
  ib::Cq* cq_ = nullptr;
  bool attached_ = false;
};

// Memory the NIC may access: host memory, or a device's (see verbs_memory.cc).
class Registration {
 public:
  // Throws CommError, which names the limit of locked memory if that is the cause.
  Registration(std::shared_ptr<Nic> nic, void* address, uint64_t nbytes, unsigned access,
               Device device = {});
  ~Registration();
  Registration(Registration&& other) noexcept;
  Registration& operator=(Registration&&) = delete;
  uint32_t lkey() const { return mr_->lkey; }
  uint32_t rkey() const { return mr_->rkey; }

 private:
  std::shared_ptr<Nic> nic_;
  ib::Mr* mr_ = nullptr;
};

}  // namespace afd_comm
