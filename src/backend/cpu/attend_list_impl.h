// SPDX-License-Identifier: MIT
// Attend over listed rows, chunk by chunk.
//
// Heads go one after the other over the rows whose mask names them, straight from fp16: the union
// of a group has 1.4 heads per row, so that is less work than all heads on all rows, and a row
// never touches a head that does not attend it. The lines of the union are fetched in its order:
// into the second-level cache the values of a chunk while its keys are scored, and the keys of the
// next chunk while its values are summed; into the first level the keys of the next vector of rows.
// So memory is read all the time and repeats by other heads come from a cache.
//
// With lazy values, what is read of a chunk is known when its keys are scored: its values are
// fetched while the next keys are scored, and summed after that.
//
// Bound by memory, and by address translation where rows are many: a row is a page of its own.

// Keys and values that will be needed, and how far they have been fetched: all of them in `steps`
// steps, evenly, while something else is computed. Many prefetches in a row are as bad as none: the
// core waits for them.
struct Fetch {
  int n;
  int at;
  int steps;
  int due;                                // times steps
  const Half* part[2 * kAttendListRows];  // head_dim halves each
};

constexpr int kLineHalves = 32;

// Parts whose first lines are fetched together: they lie on different pages, and translations
// overlap only when several are under way.
constexpr int kFetchPages = 4;

FATHOM_INLINE void FetchPart(const Half* part, int head_dim) {
  for (int d = 0; d < head_dim; d += kLineHalves) PrefetchFar(part + d);
}

FATHOM_INLINE void StepFetch(Fetch* fetch, int head_dim) {
  for (fetch->due += fetch->n; fetch->due >= fetch->steps; fetch->due -= fetch->steps) {
    const int at = fetch->at++;
    for (int i = at; at % kFetchPages == 0 && i < at + kFetchPages && i < fetch->n; ++i) {
      PrefetchFar(fetch->part[i]);
    }
    for (int d = kLineHalves; d < head_dim; d += kLineHalves) PrefetchFar(fetch->part[at] + d);
  }
}

FATHOM_INLINE void StartFetch(Fetch* fetch, int steps) {
  fetch->n = fetch->at = fetch->due = 0;
  fetch->steps = steps;
}

FATHOM_INLINE void AddFetch(const Half* const* row, int n, int offset, Fetch* fetch) {
  for (int i = 0; i < n; ++i) fetch->part[fetch->n + i] = row[i] + offset;
  fetch->n += n;
}

// The rows that one head attends.
struct HeadRows {
  int n;
  const Half* row[kAttendListRows + kLanes];
};

struct ListChunk {
  int n;
  const Half* row[kAttendListRows];
  int n_pairs;    // of head and row
  int n_vectors;  // of kLanes rows of one head
  HeadRows of_head[kMaxGroup];
};

FATHOM_INLINE int RowsOfChunk(const AttendListArgs& a, std::int64_t chunk) {
  const std::int64_t left = a.n_rows - chunk * a.chunk_rows;
  return left < a.chunk_rows ? (left < 0 ? 0 : static_cast<int>(left)) : a.chunk_rows;
}

// Rows of a chunk, none beyond the last, and of its heads.
void ListRows(const AttendListArgs& a, std::int64_t c, ListChunk* chunk) {
  const std::int32_t* tokens = a.tokens + c * a.chunk_rows;
  const std::uint16_t* mask = a.mask + c * a.chunk_rows;
  chunk->n = RowsOfChunk(a, c);
  chunk->n_pairs = chunk->n_vectors = 0;
  for (int i = 0; i < chunk->n; ++i) {
    chunk->row[i] = a.rows + static_cast<std::int64_t>(tokens[i]) * 2 * a.head_dim;
  }
  for (int h = 0; h < a.group; ++h) {
    HeadRows& list = chunk->of_head[h];
    int n = 0;
    for (int i = 0; i < chunk->n; ++i) {
      list.row[n] = chunk->row[i];
      n += mask[i] >> h & 1;
    }
    list.n = n;
    for (int r = 0; n > 0 && r < kLanes; ++r) {
      list.row[n + r] = list.row[n - 1];  // completes the last vector
    }
    chunk->n_pairs += n;
    chunk->n_vectors += (n + kLanes - 1) / kLanes;
  }
}

FATHOM_INLINE F32 DotListed(const Half* const* rows, const float* q, int head_dim, Fetch* fetch) {
  F32 sum[kLanes];
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) sum[r] = Zero();
  for (int d = 0; d < head_dim; d += kLanes) {
    StepFetch(fetch, head_dim);
    const F32 x = Load(q + d);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) sum[r] = MulAdd(LoadHalf(rows[r] + d), x, sum[r]);
  }
  return ReduceRows(sum);
}

// Which scores are not below the limit, NaN among them.
FATHOM_INLINE void FindHeavy(const float* score, int n, float scale, float limit,
                             unsigned char* heavy) {
  for (int i = 0; i < n; ++i) heavy[i] = score[i] * scale < limit ? 0 : 1;
}

// Weights of a chunk, p: [group][kAttendListRows], its tops and sums, and unless null which of the
// rows of a head are heavy, heavy: [group][kAttendListRows].
void ScoreChunk(const AttendListArgs& a, const ListChunk& chunk, float* p, float* top, float* sum,
                unsigned char* heavy, Fetch* fetch) {
  for (int h = 0; h < a.group; ++h) {
    const HeadRows& list = chunk.of_head[h];
    float* of_head = p + h * kAttendListRows;
    for (int i = 0; i < list.n; i += kLanes) {
      for (int r = i + kLanes; r < i + 2 * kLanes && r < list.n; ++r) {
        for (int d = 0; d < a.head_dim; d += kLineHalves) Prefetch(list.row[r] + d);
      }
      const F32 dot = DotListed(list.row + i, a.q + h * a.head_dim, a.head_dim, fetch);
      Store(of_head + i, FirstLanes(dot, list.n - i, Set(-__builtin_inff())));
    }
    if (heavy != nullptr)
      FindHeavy(of_head, list.n, a.scale, a.limit[h], heavy + h * kAttendListRows);
    SoftmaxChunk(of_head, (list.n + kLanes - 1) / kLanes * kLanes, a.scale, top + h, sum + h);
  }
}

template <int Vectors>
FATHOM_INLINE void SumListed(const HeadRows& list, const float* p, int head_dim, int at, float* out,
                             Fetch* fetch) {
  F32 sum[Vectors];
#pragma GCC unroll 16
  for (int v = 0; v < Vectors; ++v) sum[v] = Zero();
  for (int i = 0; i < list.n; ++i) {
    StepFetch(fetch, head_dim);
    const F32 weight = Set(p[i]);
    const Half* value = list.row[i] + head_dim + at;
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      sum[v] = MulAdd(weight, LoadHalf(value + v * kLanes), sum[v]);
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < Vectors; ++v) Store(out + at + v * kLanes, sum[v]);
}

// Weighted values of rows in lists by head, out: [group][head_dim].
void SumChunk(const AttendListArgs& a, const HeadRows* lists, const float* p, float* out,
              Fetch* fetch) {
  const int dim = a.head_dim;
  for (int h = 0; h < a.group; ++h, p += kAttendListRows, out += dim) {
    const HeadRows& list = lists[h];
    int d = 0;
    for (; d + 8 * kLanes <= dim; d += 8 * kLanes) SumListed<8>(list, p, dim, d, out, fetch);
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes) SumListed<4>(list, p, dim, d, out, fetch);
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes) SumListed<2>(list, p, dim, d, out, fetch);
    for (; d < dim; d += kLanes) SumListed<1>(list, p, dim, d, out, fetch);
  }
}

// Steps that ScoreChunk makes, and SumChunk for that many rows of all heads together.
int ScoreSteps(const AttendListArgs& a, const ListChunk& chunk) {
  return chunk.n_vectors * (a.head_dim / kLanes);
}
int SumSteps(const AttendListArgs& a, int n_pairs) {
  const int vectors = a.head_dim / kLanes;
  return n_pairs * (vectors / 8 + (vectors >> 2 & 1) + (vectors >> 1 & 1) + (vectors & 1));
}

// What a chunk reads of the values: rows by head with their weights, and all of them once.
struct HeavyRows {
  HeadRows of_head[kMaxGroup];
  float weight[kMaxGroup * kAttendListRows];
  int n_pairs;
  int n;
  const Half* row[kAttendListRows];
};

// The heavy rows of the c-th chunk. p, heavy: [group][kAttendListRows] of ScoreChunk.
void KeepHeavy(const AttendListArgs& a, std::int64_t c, const ListChunk& chunk, const float* p,
               const unsigned char* heavy, HeavyRows* kept) {
  const std::uint16_t* mask = a.mask + c * a.chunk_rows;
  unsigned char read[kAttendListRows] = {};
  kept->n_pairs = 0;
  for (int h = 0; h < a.group; ++h, p += kAttendListRows, heavy += kAttendListRows) {
    const HeadRows& list = chunk.of_head[h];
    HeadRows& heavy_list = kept->of_head[h];
    float* weight = kept->weight + h * kAttendListRows;
    int n = 0;
    float light = 0;
    for (int i = 0; i < list.n; ++i) {
      heavy_list.row[n] = list.row[i];
      weight[n] = p[i];
      light += heavy[i] != 0 ? 0.0f : p[i];
      n += heavy[i];
    }
    heavy_list.n = n;
    kept->n_pairs += n;
    a.light[c * a.group + h] = light;
    int at = 0;  // of the chunk's rows, how many the head attends
    for (int i = 0; i < chunk.n; ++i) {
      const int attends = mask[i] >> h & 1;
      read[i] = static_cast<unsigned char>(read[i] | (heavy[at] & attends));
      at += attends;
    }
  }
  int n = 0;
  for (int i = 0; i < chunk.n; ++i) {
    kept->row[n] = chunk.row[i];
    n += read[i];
  }
  kept->n = n;
  a.n_values[c] = n;
}

void StartKeys(const AttendListArgs& a, ListChunk* chunk) {
  ListRows(a, 0, chunk);
  for (int i = 0; i < chunk->n; ++i) FetchPart(chunk->row[i], a.head_dim);
}

// Two chunks are under way: keys of the c-th, values of the one before.
void AttendLazily(const AttendListArgs& a) {
  alignas(64) float p[kMaxGroup * kAttendListRows];
  unsigned char heavy[kMaxGroup * kAttendListRows + 1] = {};
  ListChunk chunks[2];
  HeavyRows kept[2];
  kept[1].n = kept[1].n_pairs = 0;
  Fetch fetch;
  StartKeys(a, &chunks[0]);
  const std::int64_t n_chunks = (a.n_rows + a.chunk_rows - 1) / a.chunk_rows;
  for (std::int64_t c = 0; c < n_chunks; ++c) {
    const ListChunk& now = chunks[c % 2];
    ListChunk& next = chunks[(c + 1) % 2];
    const HeavyRows& before = kept[(c + 1) % 2];
    ListRows(a, c + 1, &next);
    StartFetch(&fetch, ScoreSteps(a, now) + (next.n > 0 ? SumSteps(a, before.n_pairs) : 0));
    AddFetch(before.row, before.n, a.head_dim, &fetch);
    AddFetch(next.row, next.n, 0, &fetch);
    ScoreChunk(a, now, p, a.top + c * a.group, a.sum + c * a.group, heavy, &fetch);
    KeepHeavy(a, c, now, p, heavy, &kept[c % 2]);
    if (next.n == 0) {
      StartFetch(&fetch, SumSteps(a, before.n_pairs));
      AddFetch(kept[c % 2].row, kept[c % 2].n, a.head_dim, &fetch);
    }
    if (c == 0) continue;
    SumChunk(a, before.of_head, before.weight, a.out + (c - 1) * a.group * a.head_dim, &fetch);
  }
  if (n_chunks == 0) return;
  const HeavyRows& last = kept[(n_chunks - 1) % 2];
  StartFetch(&fetch, 1);
  SumChunk(a, last.of_head, last.weight, a.out + (n_chunks - 1) * a.group * a.head_dim, &fetch);
}

void AttendListed(const AttendListArgs* args) {
  const AttendListArgs& a = *args;
  if (a.limit != nullptr) {
    AttendLazily(a);
    return;
  }
  alignas(64) float p[kMaxGroup * kAttendListRows];
  ListChunk chunks[2];
  Fetch fetch;
  StartKeys(a, &chunks[0]);
  for (std::int64_t c = 0; c * a.chunk_rows < a.n_rows; ++c) {
    const ListChunk& now = chunks[c % 2];
    ListChunk& next = chunks[(c + 1) % 2];
    StartFetch(&fetch, ScoreSteps(a, now));
    AddFetch(now.row, now.n, a.head_dim, &fetch);
    ScoreChunk(a, now, p, a.top + c * a.group, a.sum + c * a.group, nullptr, &fetch);
    ListRows(a, c + 1, &next);
    StartFetch(&fetch, SumSteps(a, now.n_pairs));
    AddFetch(next.row, next.n, 0, &fetch);
    SumChunk(a, now.of_head, p, a.out + c * a.group * a.head_dim, &fetch);
    a.n_values[c] = now.n;
    for (int h = 0; h < a.group; ++h) a.light[c * a.group + h] = 0;
  }
}

void AttendKeys(const AttendListArgs* args) {
  const AttendListArgs& a = *args;
  alignas(64) float p[kMaxGroup * kAttendListRows];
  ListChunk chunk;
  Fetch fetch;
  StartKeys(a, &chunk);
  StartFetch(&fetch, 1);
  ScoreChunk(a, chunk, p, a.top, a.sum, nullptr, &fetch);
}
