//! What a person sees of a claim. This is the one place that builds it, for the command line and for any page.
//!
//! A view is a pure function of what is stored ([`StoredClaim`](crate::stored::StoredClaim)), of the time, and of what
//! was just measured on the machine of whoever looks ([`ClaimNow`], [`PoolNow`]). Nothing here touches the kernel or the
//! network. Which rung holds, for which reason, with which sizes and ages is decided here. Tables, colours and the
//! sentences around them belong to whoever shows it.
//!
//! ```text
//! Ladder       trunk, one branch for each use, what holds them
//! Explanation  the same, and what is wrong besides
//! ClaimLine    one claim among others: sizes, how full, state
//! Forecast     what a growth would do, by the planner's own rules
//! ```

mod copies;
mod explanation;
mod forecast;
mod head;
mod held;
mod ladder;
mod line;
mod measured;
mod rung;
#[cfg(any(test, feature = "scenarios"))]
pub mod scenario;
mod shortage;
mod state;
#[cfg(test)]
mod tests;

pub use self::copies::{age, degraded, state_word, with_age};
pub use self::explanation::Explanation;
pub use self::forecast::{Forecast, Layer, Stock, Would};
pub use self::head::{ClaimHead, Origin, goal, is_bound, is_growing, reported, requested};
pub use self::held::{Held, held};
pub use self::ladder::{Branch, BranchState, Ladder, UseKind, rungs};
pub use self::line::ClaimLine;
pub use self::measured::{ClaimNow, PoolNow};
pub use self::rung::{RungState, RungView};
pub use self::shortage::Shortage;
pub use self::state::State;
