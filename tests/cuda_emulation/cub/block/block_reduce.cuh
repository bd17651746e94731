// SPDX-License-Identifier: MIT
// Included by src/backend/cuda, and nothing of it used.
#pragma once
