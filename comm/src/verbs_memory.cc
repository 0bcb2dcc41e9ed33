// Backend verbs: registering memory with a NIC.
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "verbs_nic.h"

namespace afd_comm {
namespace {

std::string locked_memory_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur / 1024) + " KiB";
}

[[noreturn]] void refused(const Nic& nic, uint64_t nbytes, Device device, int error,
                          const std::string& no_dmabuf) {
  const std::string what = "cannot register " + std::to_string(nbytes) + " bytes of " +
                           device_text(device) + " memory with " + nic.name() + ": " +
                           errno_text(error);
  if (!device.is_cpu())
    throw CommError(what + " (dma-buf: " + no_dmabuf +
                    "); it needs dma-buf export (kernel 5.12, a driver that has it) or, for CUDA, "
                    "nvidia-peermem (modprobe nvidia-peermem)");
  if (error == ENOMEM || error == EPERM || error == EAGAIN)
    throw CommError(what + "; the limit of locked memory is " + locked_memory_limit() +
                    ": raise it with `ulimit -l unlimited` (systemd: LimitMEMLOCK=infinity, "
                    "docker: --ulimit memlock=-1, all users: /etc/security/limits.conf)");
  throw CommError(what + "; look at the kernel's log");
}

}  // namespace

Registration::Registration(std::shared_ptr<Nic> nic, void* address, uint64_t nbytes,
                           unsigned access, Device device)
    : nic_(std::move(nic)) {
  const Verbs& verbs = nic_->verbs();
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::string no_dmabuf = "the RDMA libraries do not have it";
  if (!device.is_cpu() && verbs.reg_dmabuf_mr != nullptr) {
    // The kernel keeps the buffer alive, so the descriptor is needed only for this call.
    try {
      const DmaBuf buffer = open_accelerator(device)->dmabuf(address, nbytes);
      mr_ = verbs.reg_dmabuf_mr(nic_->pd(), buffer.offset, nbytes, at, buffer.fd.get(),
                                static_cast<int>(access));
      no_dmabuf = errno_text(errno);
    } catch (const CommError& error) {
      no_dmabuf = error.what();
    }
    if (mr_ != nullptr) return;
  }
  // Host memory; or device memory that nvidia-peermem translates. Relaxed PCIe ordering is safe,
  // since no thread reads memory before its completion, and fast NICs need it for full speed.
  if (verbs.reg_mr_iova2 != nullptr) {
    mr_ = verbs.reg_mr_iova2(nic_->pd(), address, nbytes, at, access | ib::kRelaxedOrdering);
  } else {
    mr_ = verbs.reg_mr(nic_->pd(), address, nbytes, static_cast<int>(access));
  }
  if (mr_ == nullptr) refused(*nic_, nbytes, device, errno, no_dmabuf);
}

std::string Nic::refuses(Device device) {
  const std::lock_guard<std::mutex> lock(testing_);
  const std::pair key{device.kind, device.index};
  if (const auto known = refusals_.find(key); known != refusals_.end()) return known->second;
  const DeviceMemory sample(open_accelerator(device), 1);
  std::string why;
  try {
    Registration(shared_from_this(), sample.get(), 1, ib::kLocalWrite, device);
  } catch (const CommError& error) {
    why = error.what();
  }
  return refusals_[key] = why;
}

Registration::Registration(Registration&& other) noexcept
    : nic_(std::move(other.nic_)), mr_(std::exchange(other.mr_, nullptr)) {}

Registration::~Registration() {
  if (mr_ != nullptr) nic_->verbs().dereg_mr(mr_);
}

}  // namespace afd_comm
