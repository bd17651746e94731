// SPDX-License-Identifier: MIT
// What a scanning method leaves for the next process: index, factors and mean values.
#include "memory/state_stream.h"
#include "method/sparse_method.h"

namespace fathom {

bool SparseMethod::Save(StateWriter* out) {
  if (!SaveIndex(out)) return false;
  out->Put(max_tokens_);
  out->Put(fitted_tokens_);
  out->PutAll(factor_);
  out->PutAll(fitted_);
  for (const ValueMeans& values : values_) values.Save(out);
  return true;
}

void SparseMethod::Load(StateReader* in) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  LoadIndex(in);
  max_tokens_ = in->GetIn<std::int64_t>(0, kMost);
  fitted_tokens_ = in->GetIn<std::int64_t>(0, kMost);
  factor_ = in->GetAll<float>(factor_.size());
  fitted_ = in->GetAll<char>(fitted_.size());
  for (ValueMeans& values : values_) values.Load(in);
}

}  // namespace fathom
