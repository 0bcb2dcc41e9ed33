#include "zero_copy.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>

// After time.h, because the kernel's header uses timespec without including it.
#include <linux/errqueue.h>

#include <algorithm>

namespace afd_comm {

void ZeroCopy::allow(int fd, const void* address, uint64_t nbytes) {
  const int on = 1;
  enabled_ = setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0;
  allowed_.push_back({static_cast<const uint8_t*>(address), nbytes});
}

bool ZeroCopy::wants(const void* data, uint64_t nbytes) const {
  if (!enabled_ || nbytes < least_) return false;
  const auto* begin = static_cast<const uint8_t*>(data);
  return std::any_of(allowed_.begin(), allowed_.end(), [&](const Range& range) {
    return begin >= range.begin && nbytes <= range.nbytes &&
           static_cast<uint64_t>(begin - range.begin) <= range.nbytes - nbytes;
  });
}

void ZeroCopy::reap(int fd) {
  while (done_ != sent_) {
    alignas(cmsghdr) char control[256];
    msghdr message{};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      const bool ours = (c->cmsg_level == SOL_IP && c->cmsg_type == IP_RECVERR) ||
                        (c->cmsg_level == SOL_IPV6 && c->cmsg_type == IPV6_RECVERR);
      if (!ours) continue;
      const auto& error = *reinterpret_cast<const sock_extended_err*>(CMSG_DATA(c));
      if (error.ee_origin != SO_EE_ORIGIN_ZEROCOPY || error.ee_errno != 0) continue;
      if (error.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) copied_ = true;
      // The kernel counts in 32 bits; what it reports lies less than 2^31 behind what was sent.
      const auto behind = [this](uint32_t n) { return sent_ - (static_cast<uint32_t>(sent_) - n); };
      complete(behind(error.ee_info), behind(error.ee_data));
    }
  }
}

void ZeroCopy::complete(uint64_t first, uint64_t last) {
  early_.emplace_back(first, last);
  // Numbers are assigned in order but may be reported out of order.
  for (bool found = true; found;) {
    found = false;
    for (std::size_t i = 0; i < early_.size(); ++i) {
      if (early_[i].first != done_) continue;
      done_ = early_[i].second + 1;
      early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(i));
      found = true;
      break;
    }
  }
}

}  // namespace afd_comm
