// The timeline of one step of a plan, to the femtosecond: what src/gradwire/sim/replay.py says in Python, with the same result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace gradwire_planner {

using Time = std::int64_t;  // femtoseconds
using Key = std::int64_t;   // place in the launch order

enum Resource { COMPUTE, POOL, INTRA, INTER, RESOURCES, DONE = RESOURCES };

constexpr Time kNever = Time{1} << 62;  // sums of times stay below it: Line::fits
constexpr int kNone = 1 << 30;          // above all buckets
constexpr int kPhaseBits = 2;           // an option has at most four link tasks
constexpr int kMostPhases = (1 << kPhaseBits) - 1;
constexpr int kKeyBits = 40;
constexpr Key kLate = 2;  // urgency of what goes behind backward

struct Task {
  Time length;
  int resource, urgency, phase;
};

struct Exchange {
  int task;     // its place among the program's tasks
  Time behind;  // of the tasks between this exchange and the next one, or the end
};

inline bool on_link(const Task& task) { return task.resource == INTRA || task.resource == INTER; }

struct Program {
  std::vector<Task> tasks;  // the last one is DONE
  std::vector<Exchange> exchanges;
  Time busy[RESOURCES] = {0, 0, 0, 0};
  Time chain = 0;  // all tasks, one after the other
  int codecs = 0;

  void add(Task task) {
    busy[task.resource] += task.length;
    chain += task.length;
    if (on_link(task)) {
      exchanges.push_back({static_cast<int>(tasks.size()), 0});
    } else if (!exchanges.empty()) {
      exchanges.back().behind += task.length;
    }
    tasks.push_back(task);
  }
};

template <class T>
struct Heap {  // the least first
  std::vector<T> items;
  bool empty() const { return items.empty(); }
  const T& front() const { return items.front(); }
  void push(T item) {
    items.push_back(item);
    std::push_heap(items.begin(), items.end(), std::greater<T>());
  }
  T pop() {
    std::pop_heap(items.begin(), items.end(), std::greater<T>());
    const T item = items.back();
    items.pop_back();
    return item;
  }
};

using Timed = std::pair<Time, Key>;

// Sorted. Most items come in their order.
struct Queue {
  std::vector<Timed> items;
  std::size_t head = 0;
  bool empty() const { return head == items.size(); }
  const Timed& front() const { return items[head]; }
  Timed pop() { return items[head++]; }
  void push(Timed item) {
    items.push_back(item);
    for (std::size_t at = items.size() - 1; at > head && item < items[at - 1]; at--) std::swap(items[at], items[at - 1]);
  }
  void forget() {
    items.erase(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(head));
    head = 0;
  }
};

struct Progress {
  const Task* task = nullptr;  // under way
  Time since = -1;             // an exchange waits for its turn since this time
};

// All there is at the moment when a bucket gets ready, before it does anything.
struct State {
  Time now = 0, finish = 0;
  int part = 0;
  int open = 0;  // buckets before this one are done
  Heap<Key> ready;
  Queue coming[RESOURCES];  // for compute, by the resource of the task before
  Heap<Timed> pool;
  Heap<Time> workers;
  Time free[RESOURCES] = {0, 0, 0, 0}, spent[RESOURCES] = {0, 0, 0, 0};
  Key begun[RESOURCES] = {-1, -1, -1, -1};  // the last exchange
  Key due[RESOURCES] = {-1, -1, -1, -1};    // the exchange whose turn it is
  std::vector<Progress> progress;           // of buckets from `open` on
};

// An exchange of a plan.
struct Launched {
  const Task* task = nullptr;
  Time length = 0;
  Time rest = 0;   // from the exchange's begin to the step's end, at least: see Known
  int next = 0;    // the key of the link's next exchange
  int after = 0;   // the resource of the bucket's next task
};

// What is known before a run.
struct Known {
  Time step;                  // of an earlier run that was recorded
  int alike;                  // from this bucket on its programs were the same
  bool rests = false;         // whether the rest of each exchange is known
  int own = kNone;            // this bucket has another program, and has done nothing when the run begins
};

// One model's computation, and the programs its buckets may have.
struct Line {
  std::vector<Time> after;  // when each gradient would be ready if there were nothing but computation
  int workers = 1;
  std::vector<std::unique_ptr<Program>> programs;

  bool fits(double femtoseconds) const { return femtoseconds + static_cast<double>(after.back()) < 4e18; }
};

inline Key launch_key(Key bucket, int phase, int skew) { return (bucket + skew * phase) << kPhaseBits | phase; }

inline int phase_of(Key key) { return static_cast<int>(key & kMostPhases); }

inline int bucket_of(Key key, int skew) { return static_cast<int>(key >> kPhaseBits) - skew * phase_of(key); }

// A plan: programs by bucket, and how many gradients must be there before each is ready.
class Buckets {
 public:
  Buckets(std::vector<int> releases, int skew)
      : releases(std::move(releases)), skew(skew), programs_(this->releases.size(), nullptr) {
    for (const int link : {INTRA, INTER}) words_[link].assign(launch_key(count(), kMostPhases, skew) / 64 + 1, 0);
    for (const int link : {INTRA, INTER}) first_[link] = none();
    launched_.resize(none() + 1);
  }

  int count() const { return static_cast<int>(programs_.size()); }
  const Program* at(int bucket) const { return programs_[bucket]; }
  const Time* busy() const { return busy_; }  // of each resource, in all programs

  void set(int bucket, const Program* program) {
    if (const Program* old = programs_[bucket]) {
      for (int r = 0; r < RESOURCES; r++) busy_[r] -= old->busy[r];
      for (int phase = 0; phase < static_cast<int>(old->exchanges.size()); phase++) take_out(launch_key(bucket, phase, skew));
    }
    programs_[bucket] = program;
    for (int r = 0; r < RESOURCES; r++) busy_[r] += program->busy[r];
    for (int phase = 0; phase < static_cast<int>(program->exchanges.size()); phase++)
      put_in(launch_key(bucket, phase, skew), &program->tasks[program->exchanges[phase].task]);
  }

  // Above all keys: stands for no exchange.
  Key none() const { return static_cast<Key>(words_[INTER].size()) * 64; }

  // The key of the link's exchange after this one.
  Key due_after(int link, Key key) const { return key < 0 ? first_[link] : launched_[key].next; }

  // Whether a link has an exchange with this key.
  bool has(Key key) const { return ((words_[INTRA][key / 64] | words_[INTER][key / 64]) >> (key % 64) & 1) != 0; }

  Launched& exchange(Key key) { return launched_[key]; }
  const Launched* exchanges() const { return launched_.data(); }

  std::vector<int> releases;
  int skew;

 private:
  std::vector<const Program*> programs_;
  std::vector<std::uint64_t> words_[RESOURCES];  // a bit for each key at which the link has an exchange
  std::vector<Launched> launched_;               // by key
  Key first_[RESOURCES];                         // the key of each link's first exchange
  Time busy_[RESOURCES] = {0, 0, 0, 0};

  // The key of the link's last exchange before this key; -1 if there is none.
  Key before(int link, Key key) const {
    const std::vector<std::uint64_t>& words = words_[link];
    std::ptrdiff_t at = key / 64;
    std::uint64_t word = words[at] & ((std::uint64_t{1} << (key % 64)) - 1);
    while (word == 0) {
      if (--at < 0) return -1;
      word = words[at];
    }
    return at * 64 + 63 - __builtin_clzll(word);
  }

  void join(int link, Key before, Key key) {
    if (before < 0) {
      first_[link] = key;
    } else {
      launched_[before].next = static_cast<int>(key);
    }
  }

  void take_out(Key key) {
    const int link = launched_[key].task->resource;
    words_[link][key / 64] ^= std::uint64_t{1} << (key % 64);
    join(link, before(link, key), launched_[key].next);
  }

  void put_in(Key key, const Task* task) {
    const int link = task->resource;
    const Key last = before(link, key);
    launched_[key] = {task, task->length, 0, static_cast<int>(due_after(link, last)), task[1].resource};
    join(link, last, key);
    words_[link][key / 64] ^= std::uint64_t{1} << (key % 64);
  }
};

class Step {
 public:
  explicit Step(const Line& line) : line_(line) {}

  Time length = 0;                  // of the last run, if it came to its end
  std::vector<Time> begins, ends;   // of a recorded run: each bucket's first exchange began, its last one ended

  // Whether the step ends by `limit`. Begins where bucket `first` gets ready, with the state of an earlier run. known: what makes
  // it shorter to find out. Recorded: fills `states` from `first` on.
  template <bool kRecord>
  bool run(const Buckets& buckets, Time limit, std::vector<State>& states, int first, const Known* known = nullptr) {
    buckets_ = &buckets;
    launched_ = buckets.exchanges();
    rests_ = known != nullptr && known->rests;
    const int count = buckets.count();
    Time total[RESOURCES];
    for (int r = 0; r < RESOURCES; r++) total[r] = buckets.busy()[r];
    total[COMPUTE] += line_.after.back() - line_.after.front();
    progress_.resize(count);
    waits_.assign(buckets.none() + 1, -1);
    if (kRecord) {
      states.resize(count);
      begins.resize(count);
      ends.resize(count);
    }
    restore(first > 0 ? &states[first] : nullptr);
    if (known != nullptr && known->own < first) progress_[known->own].task = buckets.at(known->own)->tasks.data();
    for (int r = 0; r < RESOURCES; r++) left_[r] = total[r] - now_.spent[r];
    // programs that changed may have put their exchanges before the one whose turn it was
    for (const int link : {INTRA, INTER}) now_.due[link] = buckets.due_after(link, now_.begun[link]);
    over_ = 0;
    if (rests_)
      for (const int link : {INTRA, INTER}) over_ = std::max(over_, now_.free[link] + launched_[now_.due[link]].rest);
    const std::vector<Time>& after = line_.after;
    const int last = static_cast<int>(after.size()) - 1;
    following_ = first;
    while (over_ <= limit) {
      while (following_ < count && buckets.releases[following_] == now_.part) {
        if (kRecord) save(states[following_], total);
        if (known != nullptr && goes_on_like(states[following_], known->alike)) {
          length = known->step + now_.now - states[following_].now;
          return length <= limit;
        }
        const int bucket = following_++;
        progress_[bucket].task = buckets.at(bucket)->tasks.data();
        next<kRecord>(bucket, now_.now);
      }
      while (!now_.pool.empty() && now_.pool.front().first <= now_.now) take_in_pool<kRecord>();
      if (soon_ <= now_.now) take_what_came();
      if (!now_.ready.empty() && (now_.ready.front() >> kKeyBits < kLate || now_.part == last)) {
        const int bucket = bucket_of(now_.ready.pop() & ((Key{1} << kKeyBits) - 1), buckets.skew);
        spend(progress_[bucket].task++->length);
        next<kRecord>(bucket, now_.now);
      } else if (now_.part < last) {
        // as many gradients as nothing can come between
        int until = following_ < count ? buckets.releases[following_] : last;
        if (until > now_.part + 1) {
          const Time reached = soonest() - now_.now + after[now_.part];
          const auto found = std::lower_bound(after.begin() + now_.part + 1, after.begin() + until, reached);
          until = static_cast<int>(found - after.begin());
        }
        spend(after[until] - after[now_.part]);
        now_.part = until;
      } else if (const Time soon = soonest(); soon < kNever) {
        now_.now = soon;
      } else {
        break;
      }
    }
    length = std::max(now_.finish, now_.now);
    return std::max(length, over_) <= limit;
  }

 private:
  const Line& line_;
  const Buckets* buckets_ = nullptr;
  const Launched* launched_ = nullptr;
  bool rests_ = false;
  State now_;
  Time soon_ = kNever;               // when the first of what comes for compute does
  int following_ = 0;                // the bucket that gets ready next
  std::vector<Progress> progress_;   // of buckets before it that are not done, without `since`
  std::vector<Time> waits_;          // by key: since when an exchange waits for its turn, or -1
  Time left_[RESOURCES] = {0, 0, 0, 0}, over_ = 0;

  // When something comes for compute or for the pool; kNever if nothing does.
  Time soonest() const { return now_.pool.empty() ? soon_ : std::min(soon_, now_.pool.front().first); }

  void take_what_came() {
    soon_ = kNever;
    for (Queue& coming : now_.coming) {
      while (!coming.empty() && coming.front().first <= now_.now) now_.ready.push(coming.pop().second);
      if (!coming.empty()) soon_ = std::min(soon_, coming.front().first);
    }
  }

  void restore(const State* state) {
    soon_ = kNever;
    if (state == nullptr) {
      now_ = State();
      now_.now = line_.after.front();
      now_.workers.items.assign(line_.workers, 0);
      return;
    }
    now_ = *state;
    for (const Queue& coming : now_.coming)
      if (!coming.empty()) soon_ = std::min(soon_, coming.front().first);
    int bucket = state->open;
    for (const Progress& each : state->progress) {
      if (each.since >= 0) waits_[key_of(bucket, *each.task)] = each.since;
      progress_[bucket++].task = each.task;
    }
  }

  bool done(int bucket) const { return progress_[bucket].task->resource == DONE; }

  void save(State& state, const Time* total) {
    while (now_.open < following_ && done(now_.open)) now_.open++;
    now_.progress.assign(progress_.begin() + now_.open, progress_.begin() + following_);
    int bucket = now_.open;
    for (Progress& each : now_.progress) {
      each.since = on_link(*each.task) ? waits_[key_of(bucket, *each.task)] : -1;
      bucket++;
    }
    for (Queue& coming : now_.coming) coming.forget();
    for (int r = 0; r < RESOURCES; r++) now_.spent[r] = total[r] - left_[r];
    state = now_;
  }

  // Whether everything is as it was in the earlier run at the same bucket, but for being so much later or earlier: then the rest
  // of the step is the same, as much later or earlier. All that was before now is alike. May say no where it is so.
  bool goes_on_like(const State& then, int alike_from) const {
    if (then.open < alike_from || now_.open > then.open) return false;
    const Time later = now_.now - then.now;
    const auto alike = [&](Time mine, Time its) { return std::max(mine, now_.now) == std::max(its, then.now) + later; };
    for (const int link : {INTRA, INTER})
      if (now_.due[link] != then.due[link] || !alike(now_.free[link], then.free[link])) return false;
    if (now_.ready.items != then.ready.items || !alike(now_.finish, then.finish)) return false;
    const auto alike_key = [&](const Timed& mine, const Timed& its) {
      return mine.second == its.second && mine.first == its.first + later;
    };
    for (int r = 0; r < RESOURCES; r++) {
      const std::vector<Timed>&mine = now_.coming[r].items, &its = then.coming[r].items;
      const auto from = mine.begin() + static_cast<std::ptrdiff_t>(now_.coming[r].head);
      if (!std::equal(from, mine.end(), its.begin(), its.end(), alike_key)) return false;
    }
    const std::vector<Timed>&mine = now_.pool.items, &its = then.pool.items;
    if (!std::equal(mine.begin(), mine.end(), its.begin(), its.end(), alike_key)) return false;
    for (std::size_t worker = 0; worker < then.workers.items.size(); worker++)
      if (!alike(now_.workers.items[worker], then.workers.items[worker])) return false;
    for (int b = now_.open; b < then.open; b++)
      if (!done(b)) return false;
    for (int b = then.open; b < following_; b++) {
      const Progress& its = then.progress[b - then.open];
      if (progress_[b].task != its.task) return false;
      if (its.since >= 0 && !alike(waits_[key_of(b, *its.task)], its.since)) return false;
    }
    return true;
  }

  Key key_of(int bucket, const Task& task) const { return launch_key(bucket, task.phase, buckets_->skew); }

  void spend(Time length) {
    now_.now += length;
    left_[COMPUTE] -= length;
    over_ = std::max(over_, now_.now + left_[COMPUTE]);
  }

  // A worker of the pool does what was ready first.
  template <bool kRecord>
  void take_in_pool() {
    const Timed task = now_.pool.pop();
    const int bucket = bucket_of(task.second, buckets_->skew);
    const Time end = std::max(task.first, now_.workers.pop()) + progress_[bucket].task++->length;
    now_.workers.push(end);
    next<kRecord>(bucket, end, POOL);
  }

  // The bucket begins its next task at this time, after a task on this resource, and links do all that becomes their turn by it.
  template <bool kRecord>
  void next(int bucket, Time when, int resource = COMPUTE) {
    const Task& task = *progress_[bucket].task;
    if (!on_link(task)) return go_on(bucket, when, resource);
    waits_[key_of(bucket, task)] = when;
    unsigned changed = 1u << task.resource;  // a bit for each link at which something came
    while (changed) {
      const int link = changed & (1u << INTRA) ? INTRA : INTER;
      changed &= ~(1u << link);
      while (waits_[now_.due[link]] >= 0) changed |= serve<kRecord>(link);
    }
  }

  // The bucket's next task is on no link.
  void go_on(int bucket, Time when, int before) {
    const Task& task = *progress_[bucket].task;
    if (task.resource == DONE) {
      now_.finish = std::max(now_.finish, when);
      over_ = std::max(over_, when);
    } else if (task.resource == POOL) {
      now_.pool.push({when, key_of(bucket, task)});
    } else {
      const Key key = static_cast<Key>(task.urgency) << kKeyBits | key_of(bucket, task);
      if (when <= now_.now) {
        now_.ready.push(key);
      } else {
        now_.coming[before].push({when, key});
        soon_ = std::min(soon_, when);
      }
    }
  }

  // The bit of the link that the bucket waits for then, 0 if for none.
  template <bool kRecord>
  unsigned serve(int link) {
    const Key key = now_.due[link];
    const Launched& exchange = launched_[key];
    const int bucket = bucket_of(key, buckets_->skew), following = exchange.after;
    const Time begin = std::max(waits_[key], now_.free[link]), end = begin + exchange.length;
    waits_[key] = -1;
    now_.free[link] = end;
    now_.begun[link] = key;
    now_.due[link] = exchange.next;
    progress_[bucket].task = exchange.task + 1;
    left_[link] -= exchange.length;
    over_ = std::max(over_, end + left_[link]);
    if (rests_) over_ = std::max(over_, begin + exchange.rest);
    if (kRecord) {
      const int phase = phase_of(key);
      if (phase == 0) begins[bucket] = begin;
      if (phase == static_cast<int>(buckets_->at(bucket)->exchanges.size()) - 1) ends[bucket] = end;
    }
    if (following == INTRA || following == INTER) {
      waits_[launch_key(bucket, phase_of(key) + 1, buckets_->skew)] = end;
      return 1u << following;
    }
    go_on(bucket, end, link);
    return 0;
  }
};

}  // namespace gradwire_planner
