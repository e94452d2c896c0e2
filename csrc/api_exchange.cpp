// One phase of a piece on a lane, in one call and without Python: encode, send, receive, decode.
//
// The operations are a list that is made once (src/gradwire/transport/operations.py). A lane has one TCP connection to each
// other rank. With a rank of its node it may share two rings as well: then messages travel through these, and the connection only
// tells that the other rank is gone (phase.hpp). Elements that are copied or added go straight from the ring to where they belong.
// Messages of a pair of ranks travel in the order of the lists, which is the same on
// both. A message begins with a header, so that ranks that run different lists fail instead of adding the wrong numbers, and with
// a checksum, which is compared before anything uses the message.
#include "packed.hpp"
#include "phase.hpp"

namespace gradwire {
namespace {

// Twin of `Outcome` in src/gradwire/transport/operations.py.
struct Outcome {
  int64_t operation;     // the one that failed
  int64_t peer;          // whose connection failed; -1 where a call refused its arguments
  int64_t damaged;       // whether bytes of that peer were changed on the way
  double codec_seconds;  // of this thread, in calls
  char words[256];
};

// Calls copy(where a row lies, its first element in `packed`, elements): rows follow one another in `packed`.
template <class Copy>
void each_row(const Tensor& segments, const Tensor& flat, const Tensor& packed, const Copy& copy) {
  const Table table = table_of(segments, flat, 1);
  int64_t at = 0;
  for (int64_t i = 0; i < table.count; ++i) {
    const Segment& s = table.rows[i];
    GW_CHECK(s.numel <= packed.numel - at, "the rows have more elements than the %lld of the packed tensor",
             Long(packed.numel));
    copy(static_cast<char*>(table.data) + table.placed[i].offset * item_bytes(dtype_of(flat)), at, s.numel);
    at += s.numel;
  }
  GW_CHECK(at == packed.numel, "the rows have %lld elements and the packed tensor has %lld", Long(at), Long(packed.numel));
}

// Processor time of this thread in calls. The clock is read where calls begin or end, not for each of them.
class CallClock {
 public:
  void at(bool call) {
    if (call == runs_) return;
    const double now = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    seconds_ += call ? -now : now;
    runs_ = call;
  }
  double seconds() {
    at(false);
    return seconds_;
  }

 private:
  bool runs_ = false;
  double seconds_ = 0.0;
};

}  // namespace
}  // namespace gradwire

using namespace gradwire;

// Runs operations, in order. `connections`: to each rank; that of the own one is not used. `times`: where not NULL, begin and end of each
// operation in seconds of CLOCK_MONOTONIC. Returns 0, or 1 with the rest in `outcome`.
extern "C" __attribute__((visibility("default"))) int64_t gw_run_operations(const Connection* connections, int64_t ranks,
                                                                            double timeout_s, const Operation* operations,
                                                                            int64_t count, double* times, Outcome* outcome) {
  *outcome = {};
  int64_t at = 0;
  CallClock clock;
  try {
    Phase phase(connections, ranks, timeout_s, operations, count);
    for (; at < count; ++at) {
      const Operation& operation = operations[at];
      clock.at(operation.kind == kCall);
      if (times) times[2 * at] = seconds_of(CLOCK_MONOTONIC);
      if (operation.kind == kCall) {
        const auto function = reinterpret_cast<const char* (*)(const int64_t*)>(operation.target);
        Encoded encoded{};
        asked = &encoded;
        const char* const words = function(operation.arguments);
        asked = nullptr;
        if (words) {
          std::snprintf(outcome->words, sizeof outcome->words, "%s", words);
          outcome->operation = at;
          outcome->peer = -1;
          return 1;
        }
        phase.called(encoded);
      } else if (operation.kind == kSend) {
        phase.send(operation);
      } else if (operation.kind == kFlush) {
        phase.flush();
      } else {
        phase.receive(operation);
      }
      if (times) times[2 * at + 1] = seconds_of(CLOCK_MONOTONIC);
    }
  } catch (const Failed& failed) {
    std::snprintf(outcome->words, sizeof outcome->words, "%s", failed.words);
    outcome->operation = at;
    outcome->peer = failed.peer;
    outcome->damaged = failed.damaged;
    return 1;
  } catch (const std::exception& error) {
    std::snprintf(outcome->words, sizeof outcome->words, "%s", error.what());
    outcome->operation = at;
    outcome->peer = -1;
    return 1;
  }
  outcome->codec_seconds = clock.seconds();
  return 0;
}

// Copies a tensor, in the dtype of `into`. float32, bfloat16 and float16; or bytes.
GW_API gw_copy_into(const Tensor* into, const Tensor* source) {
  return guarded([&] {
    GW_CHECK(into->contiguous && source->contiguous && into->numel == source->numel, "a copy is as long as its source");
    if (into->dtype == kUint8 && source->dtype == kUint8) {
      std::memcpy(into->data, source->data, size_t(into->numel));
      return;
    }
    kernels().cast_decode(bytes_of(*source), dtype_of(*source), into->data, dtype_of(*into), false, into->numel);
  });
}

// Adds one tensor to another.
GW_API gw_add_into(const Tensor* into, const Tensor* source) {
  return guarded([&] {
    GW_CHECK(into->contiguous && source->contiguous && into->numel == source->numel, "a term is as long as its sum");
    kernels().cast_decode(bytes_of(*source), dtype_of(*source), into->data, dtype_of(*into), true, into->numel);
  });
}

// Gathers the elements of rows of a flat buffer, in its dtype or as float32, or adds them to float32.
GW_API gw_gather_rows(const Tensor* flat, const Tensor* segments, bool add, const Tensor* packed) {
  return guarded([&] {
    const Dtype own = dtype_of(*flat), into = dtype_of(*packed);
    GW_CHECK(packed->contiguous && (flat->contiguous || flat->places) && (own == into || into == Dtype::float32),
             "rows are gathered in their own dtype, or as float32");
    check_add(add, *packed);
    const float factor = factor_of(*flat);
    each_row(*segments, *flat, *packed, [&](const char* from, int64_t at, int64_t numel) {
      char* const to = static_cast<char*>(packed->data) + at * item_bytes(into);
      if (own == into && factor == 1.0f && !add) std::memcpy(to, from, size_t(numel * item_bytes(own)));
      else kernels().scale_into(from, own, factor, to, into == Dtype::float32, add, numel);
    });
  });
}

// Multiplies the elements of rows that lie apart by their factor. float32.
GW_API gw_scale_rows(const Tensor* flat, const Tensor* segments) {
  return guarded([&] {
    GW_CHECK(flat->places && dtype_of(*flat) == Dtype::float32, "rows are scaled where they lie apart, in float32");
    const Table table = table_of(*segments, *flat, 1);
    for (int64_t i = 0; i < table.count; ++i)
      kernels().scale(static_cast<float*>(table.data) + table.placed[i].offset, factor_of(*flat), table.placed[i].numel);
  });
}

// Puts elements back into rows of a flat buffer, or adds them.
GW_API gw_scatter_rows(const Tensor* packed, const Tensor* segments, bool add, const Tensor* flat) {
  return guarded([&] {
    GW_CHECK(packed->contiguous && (flat->contiguous || flat->places), "rows are scattered between dense tensors");
    const Dtype from = dtype_of(*packed), into = dtype_of(*flat);
    each_row(*segments, *flat, *packed, [&](char* to, int64_t at, int64_t numel) {
      kernels().cast_decode(bytes_of(*packed) + at * item_bytes(from), from, to, into, add, numel);
    });
  });
}

GW_PACKED(copy_into)
GW_PACKED(add_into)
GW_PACKED(gather_rows)
GW_PACKED(scale_rows)
GW_PACKED(scatter_rows)
