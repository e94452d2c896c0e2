// The wide-area network of an emulated cluster: a relay between the bridges of sites, in user space.
//
// Each site has an access link to a core that is never full. The relay reads Ethernet frames of one interface a site (wan0, wan1,
// ..) from packet sockets, and writes each to the interface of its destination, later: after the sender's uplink, a one-way delay
// with jitter, and the receiver's downlink. Links are queues in virtual time: a frame leaves when the one before it has left and
// its own bytes have passed at the link's rate. What a queue cannot hold is dropped, as routers do. Frames of one pair of sites
// keep their order.
//
// The kernel passes TCP segments in large packets, with checksums to be filled in later (virtio_net_hdr). The relay passes these on
// as they are: a large packet counts the bytes that its segments have on a wire, and loss takes single segments out of it.
#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <utility>
#include <vector>

namespace gradwire {
namespace {

// What the kernel says of a packet, as in linux/virtio_net.h, which is no C++.
struct PacketHeader {
  uint8_t flags, gso_type;
  uint16_t header_bytes, gso_size, checksum_start, checksum_offset;
};
constexpr uint8_t kGsoNone = 0, kGsoTcp4 = 1, kGsoEcn = 0x80;

constexpr int kLargestFrame = 70000;  // a packet of 64 KiB with its headers
constexpr int kFramesAtOnce = 64;     // of one site, before the others have their turn
constexpr int kSocketBytes = 64 << 20;  // the kernel drops what it cannot hold before the relay reads it
constexpr double kNever = std::numeric_limits<double>::infinity();

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// A site's access link.
struct Access {
  double up_bytes_per_s = kNever, down_bytes_per_s = kNever;
  double delay_s = 0;   // one way, to the core and from it
  double jitter_s = 0;  // the most that is added to the delay of a frame
  double loss = 0;      // of a segment that leaves the site
  double queue_s = 1;   // what a queue holds, in seconds at its rate
  int port = 0;         // the only one, of TCP or UDP, that is open; 0: all are
  double up_free_s = 0, down_free_s = 0;  // when the last frame has left
};

struct Frame {
  double at_s;
  uint64_t number;
  int from, site;  // `site`: to which it goes
  PacketHeader header;
  std::vector<uint8_t> bytes;
};

struct Later {
  bool operator()(const Frame& a, const Frame& b) const {
    return a.at_s > b.at_s || (a.at_s == b.at_s && a.number > b.number);
  }
};

// What is said of the relay's own work.
struct Counts {
  uint64_t frames = 0, lost_segments = 0, full_queue_segments = 0, blocked = 0, failed_sends = 0, late_frames = 0, dropped = 0,
           wire_bytes = 0;
  double latest_s = 0;  // the longest time between a frame's moment and its sending
};

// xorshift64*: fast, and the same losses in every run.
struct Random {
  uint64_t state = 0x9e3779b97f4a7c15ull;
  double next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return double((state * 0x2545f4914f6cdd1dull) >> 11) * 0x1p-53;
  }
};

uint32_t sum16(const uint8_t* bytes, int count, uint32_t sum) {
  for (int i = 0; i + 1 < count; i += 2) sum += uint32_t(bytes[i] << 8 | bytes[i + 1]);
  if (count & 1) sum += uint32_t(bytes[count - 1] << 8);
  return sum;
}

uint16_t folded(uint32_t sum) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return uint16_t(sum);
}

void put16(uint8_t* at, uint32_t value) {
  at[0] = uint8_t(value >> 8);
  at[1] = uint8_t(value);
}

uint32_t get16(const uint8_t* at) { return uint32_t(at[0] << 8 | at[1]); }

void add32(uint8_t* at, uint32_t value) {
  uint32_t number;
  std::memcpy(&number, at, 4);
  number = htonl(ntohl(number) + value);
  std::memcpy(at, &number, 4);
}

// A large packet of TCP over IPv4, by its segments.
struct Segments {
  int count = 1, header_bytes = 0, each = 0;

  Segments(const PacketHeader& header, const std::vector<uint8_t>& bytes) {
    const bool tcp4 = (header.gso_type & ~kGsoEcn) == kGsoTcp4 && header.gso_size;
    if (!tcp4 || bytes.size() < 54) return;
    const int ip = (bytes[14] & 15) * 4;
    if (bytes.size() < size_t(14 + ip + 20)) return;
    header_bytes = 14 + ip + (bytes[14 + ip + 12] >> 4) * 4;
    each = header.gso_size;
    const int payload = int(bytes.size()) - header_bytes;
    if (payload > each) count = (payload + each - 1) / each;
  }

  // Bytes on a wire, where every segment has headers of its own.
  double wire_bytes(size_t frame_bytes) const { return double(frame_bytes) + double(count - 1) * header_bytes; }

  // A packet of the segments `first` to `last` alone.
  void cut(const Frame& whole, int first, int last, PacketHeader& header, std::vector<uint8_t>& bytes) const {
    const int begin = header_bytes + first * each;
    const int end = std::min(int(whole.bytes.size()), header_bytes + last * each);
    bytes.assign(whole.bytes.begin(), whole.bytes.begin() + header_bytes);
    bytes.insert(bytes.end(), whole.bytes.begin() + begin, whole.bytes.begin() + end);
    header = whole.header;
    if (last - first == 1) header.gso_type = kGsoNone, header.gso_size = 0;
    uint8_t *ip = bytes.data() + 14, *tcp = ip + (ip[0] & 15) * 4;
    put16(ip + 2, uint32_t(bytes.size() - 14));
    put16(ip + 4, get16(ip + 4) + uint32_t(first));
    put16(ip + 10, 0);
    put16(ip + 10, uint16_t(~folded(sum16(ip, (ip[0] & 15) * 4, 0))));
    add32(tcp + 4, uint32_t(first * each));
    if (last < count) tcp[13] &= uint8_t(~(TH_FIN | TH_PUSH));
    if (first > 0) tcp[13] &= uint8_t(~0x80);  // "congestion window reduced" is said once
    const uint32_t length = uint32_t(bytes.size()) - uint32_t(tcp - bytes.data());
    put16(tcp + 16, folded(sum16(ip + 12, 8, IPPROTO_TCP + length)));  // the kernel adds the rest
  }
};

// Whether a firewall with one open port lets a frame through: packets from it or to it, and questions for addresses (ARP).
bool passes(int port, const std::vector<uint8_t>& bytes) {
  if (!port) return true;
  if (bytes.size() >= 14 && get16(bytes.data() + 12) == ETHERTYPE_ARP) return true;
  if (bytes.size() < 34 || get16(bytes.data() + 12) != ETHERTYPE_IP) return false;
  const uint8_t* ip = bytes.data() + 14;
  const size_t at = 14 + size_t(ip[0] & 15) * 4;
  const bool fragment = get16(ip + 6) & 0x1fff;  // one without ports
  if (fragment || (ip[9] != IPPROTO_TCP && ip[9] != IPPROTO_UDP) || bytes.size() < at + 4) return false;
  return int(get16(bytes.data() + at)) == port || int(get16(bytes.data() + at + 2)) == port;
}

class Relay {
 public:
  explicit Relay(int sites) : access_(size_t(sites)), sockets_(size_t(sites), -1), last_(size_t(sites) * size_t(sites), 0.0) {}

  ~Relay() {
    for (int socket : sockets_)
      if (socket >= 0) close(socket);
  }

  // Open the packet sockets. Returns 0, or the error's number.
  int open() {
    for (size_t site = 0; site < sockets_.size(); ++site) {
      const int made = sockets_[site] = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      if (made < 0) return errno;
      const int yes = 1;
      if (setsockopt(made, SOL_PACKET, PACKET_VNET_HDR, &yes, sizeof yes)) return errno;
      setsockopt(made, SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof yes);
      for (const auto& [forced, allowed] : {std::pair{SO_RCVBUFFORCE, SO_RCVBUF}, std::pair{SO_SNDBUFFORCE, SO_SNDBUF}})
        if (setsockopt(made, SOL_SOCKET, forced, &kSocketBytes, sizeof kSocketBytes))  // in the namespace of an ordinary user
          setsockopt(made, SOL_SOCKET, allowed, &kSocketBytes, sizeof kSocketBytes);   // as much as the machine allows
      sockaddr_ll address{};
      address.sll_family = AF_PACKET;
      address.sll_protocol = htons(ETH_P_ALL);
      address.sll_ifindex = int(if_nametoindex(("wan" + std::to_string(site)).c_str()));
      if (!address.sll_ifindex) return errno;
      if (bind(made, reinterpret_cast<sockaddr*>(&address), sizeof address)) return errno;
    }
    return 0;
  }

  // Relay until the standard input ends. Its lines change a site's link, or ask for the counts.
  void run() {
    std::vector<pollfd> polled;
    for (int socket : sockets_) polled.push_back({socket, POLLIN, 0});
    polled.push_back({STDIN_FILENO, POLLIN, 0});
    for (;;) {
      const double wait_s = queue_.empty() ? 1.0 : std::max(0.0, queue_.top().at_s - now_s());
      const timespec wait{time_t(wait_s), long((wait_s - double(time_t(wait_s))) * 1e9)};
      if (ppoll(polled.data(), polled.size(), &wait, nullptr) < 0 && errno != EINTR) return;
      if (polled.back().revents && !read_orders()) return;
      for (size_t site = 0; site < sockets_.size(); ++site)
        if (polled[site].revents) receive(int(site));
      send_due();
    }
  }

 private:
  void receive(int site) {
    for (int turn = 0; turn < kFramesAtOnce; ++turn) {
      Frame frame;
      iovec parts[2] = {{&frame.header, sizeof frame.header}, {buffer_, sizeof buffer_}};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = 2;
      const ssize_t got = recvmsg(sockets_[size_t(site)], &message, 0);
      if (got < ssize_t(sizeof frame.header + 14)) return;
      frame.bytes.assign(buffer_, buffer_ + size_t(got) - sizeof frame.header);
      forward(site, std::move(frame));
      send_due();
    }
  }

  void forward(int from, Frame frame) {
    ++counts_.frames;
    sites_of_[address(frame.bytes.data() + 6)] = from;
    const auto known = sites_of_.find(address(frame.bytes.data()));
    const Segments segments(frame.header, frame.bytes);
    const double now = now_s(), bytes = segments.wire_bytes(frame.bytes.size());
    Access& sender = access_[size_t(from)];
    if (!passes(sender.port, frame.bytes)) {
      ++counts_.blocked;
      return;
    }
    double left = 0;
    if (!pass(sender.up_free_s, now, now, bytes, sender.up_bytes_per_s, sender.queue_s, left)) {
      counts_.full_queue_segments += uint64_t(segments.count);
      return;
    }
    counts_.wire_bytes += uint64_t(bytes);
    const double first_byte = left - bytes / sender.up_bytes_per_s;
    for (int to = 0; to < int(access_.size()); ++to) {
      if (to == from || (known != sites_of_.end() && known->second != to)) continue;
      Access& receiver = access_[size_t(to)];
      if (!passes(receiver.port, frame.bytes)) {
        ++counts_.blocked;
        continue;
      }
      const double jitter = sender.jitter_s + receiver.jitter_s;
      const double way = sender.delay_s + receiver.delay_s + (jitter > 0 ? jitter * random_.next() : 0);
      double& last = last_[size_t(from) * access_.size() + size_t(to)];
      const double arrival = last = std::max(last, left + way);
      double at = 0;
      if (!pass(receiver.down_free_s, first_byte + way, arrival, bytes, receiver.down_bytes_per_s, receiver.queue_s, at)) {
        counts_.full_queue_segments += uint64_t(segments.count);
        continue;
      }
      frame.at_s = at;
      frame.from = from;
      frame.site = to;
      deliver(frame, segments, sender.loss);
    }
  }

  // When the last byte of a frame leaves a link, at `left`: not before the link is free and the bytes have passed since `begin`,
  // nor before `end`. False if the queue is full.
  static bool pass(double& free_s, double begin, double end, double bytes, double rate, double queue_s, double& left) {
    const double start = std::max(free_s, begin);
    if (start - begin > queue_s) return false;
    left = free_s = std::max(end, start + bytes / rate);
    return true;
  }

  // Queue the frame for sending, without the segments that are lost.
  void deliver(const Frame& frame, const Segments& segments, double loss) {
    int first = 0;
    for (int at = 0; loss > 0 && at < segments.count; ++at) {
      if (random_.next() >= loss) continue;
      ++counts_.lost_segments;
      if (at > first) queue_part(frame, segments, first, at);
      first = at + 1;
    }
    if (first == 0)
      enqueue(frame);
    else if (first < segments.count)
      queue_part(frame, segments, first, segments.count);
  }

  void queue_part(const Frame& whole, const Segments& segments, int first, int last) {
    Frame part{whole.at_s, 0, whole.from, whole.site, {}, {}};
    segments.cut(whole, first, last, part.header, part.bytes);
    enqueue(std::move(part));
  }

  void enqueue(Frame frame) {
    frame.number = number_++;
    queue_.push(std::move(frame));
  }

  void send_due() {
    while (!queue_.empty()) {
      const Frame& next = queue_.top();
      const double late = now_s() - next.at_s;
      if (late < 0) return;
      counts_.latest_s = std::max(counts_.latest_s, late);
      if (late > 0.0005) ++counts_.late_frames;
      iovec parts[2] = {{const_cast<PacketHeader*>(&next.header), sizeof next.header},
                        {const_cast<uint8_t*>(next.bytes.data()), next.bytes.size()}};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = 2;
      if (sendmsg(sockets_[size_t(next.site)], &message, 0) < 0) ++counts_.failed_sends;
      queue_.pop();
    }
  }

  // When a frame that comes now leaves at the latest: after full queues and the longest way.
  double latest_s(double now, int from, int to) const {
    const Access &sender = access_[size_t(from)], &receiver = access_[size_t(to)];
    return now + sender.queue_s + sender.delay_s + sender.jitter_s + receiver.delay_s + receiver.jitter_s + receiver.queue_s;
  }

  // Bring forward the frames that wait for the link that `site` had before. Later frames follow them in order, and queues count
  // them: later frames would be late, or dropped, until the old moments had passed.
  void hasten(int site) {
    const double now = now_s();
    const int sites = int(access_.size());
    access_[size_t(site)].up_free_s = std::min(access_[size_t(site)].up_free_s, now + access_[size_t(site)].queue_s);
    for (int to = 0; to < sites; ++to) {
      double latest = 0;
      for (int from = 0; from < sites; ++from) {
        if (from == to) continue;
        latest = std::max(latest, latest_s(now, from, to));
        double& last = last_[size_t(from) * access_.size() + size_t(to)];
        if (from == site || to == site) last = std::min(last, latest_s(now, from, to));
      }
      access_[size_t(to)].down_free_s = std::min(access_[size_t(to)].down_free_s, latest);
    }
    std::vector<Frame> waiting;
    for (; !queue_.empty(); queue_.pop()) {
      waiting.push_back(std::move(const_cast<Frame&>(queue_.top())));
      Frame& frame = waiting.back();
      if (frame.from == site || frame.site == site) frame.at_s = std::min(frame.at_s, latest_s(now, frame.from, frame.site));
    }
    queue_ = decltype(queue_)(Later{}, std::move(waiting));
  }

  static uint64_t address(const uint8_t* at) {
    uint64_t number = 0;
    std::memcpy(&number, at, 6);
    return number;
  }

  // Add the frames that the kernel dropped since the last call, because the relay came too late to read them.
  void count_dropped() {
    for (int socket : sockets_) {
      tpacket_stats since{};
      socklen_t size = sizeof since;
      if (!getsockopt(socket, SOL_PACKET, PACKET_STATISTICS, &since, &size)) counts_.dropped += since.tp_drops;
    }
  }

  // Read lines: `SITE UP_BYTES_PER_S DOWN_BYTES_PER_S DELAY_S JITTER_S LOSS QUEUE_S PORT`, a rate or port of 0 being none, or
  // `counts`.
  bool read_orders() {
    char text[4096];
    const ssize_t got = read(STDIN_FILENO, text, sizeof text);
    if (got <= 0) return got < 0 && errno == EINTR;
    orders_.append(text, size_t(got));
    for (size_t end; (end = orders_.find('\n')) != std::string::npos; orders_.erase(0, end + 1)) {
      const std::string line = orders_.substr(0, end);
      int site, port;
      double up, down, delay, jitter, loss, queue;
      if (line == "counts") {
        count_dropped();
        rusage used{};
        getrusage(RUSAGE_SELF, &used);
        const double cpu = double(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                           1e-6 * double(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
        std::printf("%llu %llu %llu %llu %llu %llu %llu %llu %.6f %.6f\n", (unsigned long long)counts_.frames,
                    (unsigned long long)counts_.lost_segments, (unsigned long long)counts_.full_queue_segments,
                    (unsigned long long)counts_.blocked, (unsigned long long)counts_.failed_sends,
                    (unsigned long long)counts_.late_frames, (unsigned long long)counts_.dropped,
                    (unsigned long long)counts_.wire_bytes, counts_.latest_s, cpu);
      } else if (std::sscanf(line.c_str(), "%d %lf %lf %lf %lf %lf %lf %d", &site, &up, &down, &delay, &jitter, &loss, &queue,
                             &port) == 8 && site >= 0 && site < int(access_.size())) {
        Access& changed = access_[size_t(site)];
        changed.up_bytes_per_s = up > 0 ? up : kNever;
        changed.down_bytes_per_s = down > 0 ? down : kNever;
        changed.delay_s = delay, changed.jitter_s = jitter, changed.loss = loss, changed.queue_s = queue, changed.port = port;
        hasten(site);
        std::printf("changed %d\n", site);
      } else {
        std::printf("refused %s\n", line.c_str());
      }
      std::fflush(stdout);
    }
    return true;
  }

  std::vector<Access> access_;
  std::vector<int> sockets_;
  std::vector<double> last_;  // of each pair of sites, when the last frame arrives at the receiver's link
  std::map<uint64_t, int> sites_of_;  // by Ethernet address
  std::priority_queue<Frame, std::vector<Frame>, Later> queue_;
  uint64_t number_ = 0;
  std::string orders_;
  Random random_;
  Counts counts_;
  uint8_t buffer_[kLargestFrame];
};

}  // namespace
}  // namespace gradwire

// Relay frames between the interfaces wan0, wan1, .. of this network namespace until the standard input ends. Returns 0, or the
// number of the error that kept it from beginning.
extern "C" __attribute__((visibility("default"))) int gw_relay(int sites) {
  const sched_param priority{1};  // a relay that waits for a processor delivers late
  if (sched_setscheduler(0, SCHED_RR, &priority)) setpriority(PRIO_PROCESS, 0, -20);
  prctl(PR_SET_TIMERSLACK, 1ul);  // else an ordinary process wakes up to 50 us after a frame's moment
  const auto relay = std::make_unique<gradwire::Relay>(sites);
  if (const int error = relay->open()) return error;
  std::printf("ready\n");
  std::fflush(stdout);
  relay->run();
  return 0;
}
